"""A rank that falls away, by an exception, an exit, a kill or a lack of memory: the others hear of it at once, whatever
the timeout, at every stage and with state on every tier."""

from __future__ import annotations

import atexit
import ctypes
import time
from dataclasses import replace
from pathlib import Path

import fallen_ranks
import pytest
import ranks
import zoo
from fallen_ranks import (
    ON_HOST,
    SOON_S,
    VICTIM,
    Planted,
    await_file,
    end_process,
    heard,
    note_time,
    plant,
    raise_planted,
    train,
)

from zerobench.engine import departures

GRACE_S = 10.0  # what a loaded machine takes on top of SOON_S
TIERS = {
    "device": (0, 1, 2, 3),
    "optimizer on the host": (1, 2, 3),
    "optimizer in files": (1, 2, 3),
    "parameters on the host": (3,),
    "parameters in files": (3,),
}
PLACES = [(tier, stage) for tier, stages in TIERS.items() for stage in stages]


def start(rank, tier, stage, folder):
    config = {}
    if tier != "device":
        in_files = zoo.SWAP | {"nvme_path": folder}
        config["offload_optimizer"] = in_files if tier.endswith("files") else ON_HOST
    if tier.startswith("parameters"):
        config["offload_param"] = {"device": "nvme" if tier.endswith("files") else "cpu"}
    return fallen_ranks.start(rank, stage=stage, **config)


def lack_memory(*_):
    bytearray(1 << 50)


EXCEPTIONS = [
    (where, fault) for where in ("forward", "backward", "step") for fault in (raise_planted, lack_memory)
]


def fall_by_exceptions(rank, tier, stage, folder):
    """The rank at fault catches what it raised, and stays until the others have heard of it."""
    found = []
    for number, (where, fault) in enumerate(EXCEPTIONS):
        place = replace(rank, meeting_point=f"{rank.meeting_point}-{number}")
        engine = start(place, tier, stage, folder)
        train(engine, rank, done=0, steps=2)
        if rank.rank == VICTIM:
            plant(engine, where, fault)
            note_time(folder, number)
            with pytest.raises((Planted, MemoryError)):
                train(engine, rank, done=2, steps=3)
            for other in (0, 2):
                await_file(Path(folder) / f"{number} {other}")
        else:
            found.append(heard(engine, rank, folder, number))
        engine.close()
    return found


@pytest.mark.parametrize(("tier", "stage"), PLACES)
def test_others_hear_of_an_exception_that_leaves_a_call_of_the_engine(tmp_path, tier, stage):
    found = ranks.run(fall_by_exceptions, tier, stage, str(tmp_path), world_size=3)
    for of_rank in (found[0], found[2]):
        for (where, fault), told in zip(EXCEPTIONS, of_rank, strict=True):
            name = "Planted (planted)" if fault is raise_planted else "MemoryError"
            assert f"rank {VICTIM} raised {name} and did not come to " in told["error"], (where, told)
            assert told["rank"] == VICTIM
            assert told["after_s"] < SOON_S + GRACE_S


def fall_with_the_process(rank, tier, stage, kind, folder):
    engine = start(rank, tier, stage, folder)
    train(engine, rank, done=0, steps=2)
    if rank.rank != VICTIM:
        return heard(engine, rank, folder, kind)
    engine.backward(engine(**zoo.points(2, rank.rank)))
    note_time(folder, kind)
    end_process(kind)
    return None


@pytest.mark.parametrize("kind", ["exit", "kill"])
@pytest.mark.parametrize(("tier", "stage"), PLACES)
def test_others_hear_of_the_end_of_a_process(tmp_path, tier, stage, kind):
    with ranks.Group(fall_with_the_process, tier, stage, kind, str(tmp_path), world_size=3) as group:
        group.wait([0, 2], timeout_s=100.0)
        for rank in (0, 2):
            told = group.outcomes[rank].value
            assert group.outcomes[rank].error is None, group.outcomes[rank].error
            assert f"rank {VICTIM} " in told["error"] and told["rank"] == VICTIM
            assert told["after_s"] < SOON_S + GRACE_S


def exit_slowly(rank, folder):
    engine = start(rank, "device", 3, folder)
    train(engine, rank, done=0, steps=2)
    if rank.rank != VICTIM:
        return heard(engine, rank, folder, "exit")
    note_time(folder, "exit")
    # What was registered before runs after: here as in a script that registers it before it imports zerobench.
    atexit.unregister(departures._tell_peers)
    atexit.register(lambda: [await_file(Path(folder) / f"exit {other}") for other in (0, 2)])
    atexit.register(departures._tell_peers)
    ctypes.pythonapi.Py_Exit(1)
    return None


def test_others_hear_of_an_exit_before_the_process_has_ended(tmp_path):
    with ranks.Group(exit_slowly, str(tmp_path), world_size=3) as group:
        group.wait([0, 2], timeout_s=100.0)
        for rank in (0, 2):
            told = group.outcomes[rank].value
            assert told and f"rank {VICTIM} is ending its process and did not come to " in told["error"], told


def fail_alike_and_return_late(rank, stage, folder):
    """Every rank's call raises, and one of them takes its time before it goes on."""
    engine = start(rank, "device", stage, folder)
    train(engine, rank, done=0, steps=1)
    for where in ("forward", "backward", "step"):
        mend = plant(engine, where, raise_planted)
        with pytest.raises(Planted):
            train(engine, rank, done=1, steps=2)
        mend()
        if where == "step":
            engine.zero_grad()
        if rank.rank == VICTIM:
            time.sleep(1.5)
        train(engine, rank, done=1, steps=2)
    engine.close()
    return True


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_fail_alike_wait_for_each_other(tmp_path, stage):
    assert ranks.run(fail_alike_and_return_late, stage, str(tmp_path), world_size=3) == [True] * 3


def retry_alone(rank, folder):
    """One rank repeats a forward that raised, which no other rank has a part in."""
    engine = start(rank, "device", 2, folder)
    train(engine, rank, done=0, steps=1)
    if rank.rank == VICTIM:
        mend = plant(engine, "forward", raise_planted)
        with pytest.raises(Planted):
            engine(**zoo.points(1, rank.rank))
        mend()
        slow = engine.module.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(1.5))
    train(engine, rank, done=1, steps=2)
    if rank.rank == VICTIM:
        slow.remove()
    train(engine, rank, done=2, steps=3)
    engine.close()
    return True


def test_a_rank_that_repeats_its_forward_at_once_is_waited_for(tmp_path):
    assert ranks.run(retry_alone, str(tmp_path), world_size=3) == [True] * 3
