"""Ranks that die, stall, give up or never come: the others raise within the timeout, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import engine_faults
import pytest
import ranks
import small_models
import torch
import zoo

import zerobench
from zerobench import _native, errors
from zerobench.engine import topology
from zerobench.engine.agreement import expect_same_setup

STAGES = (0, 1, 2, 3)
TIMEOUT_S = 3.0
# What a loaded machine may take on top: noticing is polling, and processes wait for CPUs.
GRACE_S = 20.0
CASE = zoo.Case(small_models.Chain)


def start(rank, stage, **config):
    return zerobench.initialize(
        zoo.make(CASE),
        config=rank.config(stage=stage, timeout_s=TIMEOUT_S, **(zoo.optimizer_config(CASE) | config)),
    )


def train_until_lost(rank, stage, folder):
    """Trains without end; tells when steps are under way, and what ended it."""
    engine = start(rank, stage)
    step = 0
    while True:
        try:
            zoo.run_plan(engine, CASE, step, rank.rank, [])
        except errors.CommunicationError as error:
            return engine_faults.after_the_loss(engine, rank, error, case=CASE)
        step += 1
        if step == 3:
            (Path(folder) / str(rank.rank)).touch()


def shared_memory(pid: int | str) -> list[str]:
    try:
        return [
            line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:zerobench" in line
        ]
    except OSError:
        return []


def wait_for(paths: list[Path], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not begin to train"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "stage"),
    [*((signal.SIGKILL, stage) for stage in STAGES), (signal.SIGSTOP, 0), (signal.SIGSTOP, 3)],
)
def test_a_rank_is_killed_or_stopped_in_the_middle(tmp_path, number, stage):
    names = set(os.listdir("/dev/shm"))
    with ranks.Group(train_until_lost, stage, str(tmp_path), world_size=3) as group:
        wait_for([tmp_path / str(rank) for rank in range(3)])
        pids = [process.pid for process in group.processes]
        assert all(shared_memory(pid) for pid in pids)  # the check below can see ours
        group.kill(1, number)
        began = time.monotonic()
        group.wait([0, 2], timeout_s=TIMEOUT_S + GRACE_S)
        assert time.monotonic() - began < TIMEOUT_S + GRACE_S
        for rank in (0, 2):
            value = group.outcomes[rank].value
            assert group.outcomes[rank].error is None, group.outcomes[rank].error
            assert group.outcomes[rank].exit_code == 0
            assert "rank 1" in value["error"], value
            assert len(value["again"]) == 2
            assert value["closing_s"] < TIMEOUT_S + GRACE_S
    assert not any(shared_memory(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) <= names


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_killed_in_its_backward(stage):
    with ranks.Group(engine_faults.killed_in_backward, stage) as group:
        group.wait([engine_faults.VICTIM], timeout_s=60.0)
        assert group.outcomes[engine_faults.VICTIM].exit_code == -signal.SIGKILL
        group.wait([0], timeout_s=GRACE_S)  # long before the timeout
    survivor = group.outcomes[0]
    assert survivor.error is None and survivor.exit_code == 0, survivor
    assert engine_faults.NAMES_THE_DEAD.fullmatch(survivor.value["error"]), survivor.value["error"]
    assert survivor.value["rank"] == engine_faults.VICTIM
    assert survivor.value["again"] == [survivor.value["error"]] * 2


def test_nothing_is_left_when_all_ranks_are_killed(tmp_path):
    names = set(os.listdir("/dev/shm"))
    with ranks.Group(train_until_lost, 3, str(tmp_path)) as group:
        wait_for([tmp_path / str(rank) for rank in range(2)])
        pids = [process.pid for process in group.processes]
        for rank in range(2):
            group.kill(rank)
        group.wait(timeout_s=GRACE_S)
        assert [outcome.exit_code for outcome in group.outcomes] == [-signal.SIGKILL] * 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert set(os.listdir("/dev/shm")) <= names


class Planted(Exception):
    """Error that the rank at fault raises."""


def give_up_at_stages(rank, stages, where):
    return [give_up(rank, stage, where) for stage in stages]


def give_up(rank, stage, where):
    """Rank 1 raises and leaves, by closing its engine or just by ending; the others train on."""
    engine = start(rank, stage)
    zoo.run_plan(engine, CASE, 0, rank.rank, [])
    if rank.rank == 1:
        if where == "forward":
            engine.module.blocks[1].register_forward_pre_hook(planted)
        elif where == "backward":
            engine.module.blocks[1].up.weight.register_hook(planted)
        try:
            loss = engine(**zoo.points(1, rank.rank))
            engine.backward(loss)
            raise AssertionError("nothing was planted")
        except Planted:
            if where == "forward":
                engine.close()  # in the other case the process just ends
            return None
    began = time.monotonic()
    try:
        for step in range(1, 50):
            zoo.run_plan(engine, CASE, step, rank.rank, [])
    except errors.CommunicationError as error:
        return {"error": str(error), "after_s": time.monotonic() - began}
    raise AssertionError("went on without rank 1")


def planted(*_):
    raise Planted


@pytest.mark.parametrize(("where", "stages"), [("forward", STAGES), ("backward", (1,)), ("backward", (3,))])
def test_a_rank_raises_and_leaves(where, stages):
    for value in ranks.run(give_up_at_stages, stages, where, timeout_s=100.0)[0]:
        assert "rank 1" in value["error"]
        assert value["after_s"] < TIMEOUT_S + GRACE_S


def lose_gradients_at_stages(rank):
    return [lose_gradients(rank, stage) for stage in STAGES]


def lose_gradients(rank, stage):
    """Rank 1's backward fails; it repeats the step, while the others have stepped on."""
    engine = start(rank, stage)
    zoo.run_plan(engine, CASE, 0, rank.rank, [])
    hook = engine.module.blocks[1].up.weight.register_hook(planted) if rank.rank == 1 else None
    try:
        zoo.run_plan(engine, CASE, 1, rank.rank, [])
    except Planted:
        hook.remove()
    except errors.CommunicationError as error:
        return str(error)
    try:
        for step in range(1, 10):
            zoo.run_plan(engine, CASE, step, rank.rank, [])
    except errors.CommunicationError as error:
        return str(error)
    raise AssertionError("ranks of different data stepped together")


def test_a_rank_that_lost_its_gradients_cannot_step_with_the_others():
    for of_rank in ranks.run(lose_gradients_at_stages, timeout_s=100.0):
        assert all("rank" in error for error in of_rank)


def come_alone(rank):
    if rank.rank == 1:
        return None
    began = time.monotonic()
    try:
        start(rank, 3)
    except errors.CommunicationError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("began without rank 1")


def test_a_rank_that_never_comes():
    error, after_s = ranks.run(come_alone, timeout_s=60.0)[0]
    assert "1" in error and "rank" in error
    assert TIMEOUT_S * 0.5 < after_s < TIMEOUT_S + GRACE_S


def differ(rank, kind):
    """Rank 1 is set up differently."""
    config: dict[str, Any] = {"stage": 2, "timeout_s": TIMEOUT_S}
    model = CASE.model()
    if rank.rank == 1 and kind == "blocks.3":
        model = small_models.Chain(4)
    model.register_buffer("table", torch.zeros(4))
    groups = [list(model.blocks.parameters()), [*model.inlet.parameters(), *model.outlet.parameters()]]
    if rank.rank == 1:
        if kind == "in param group 0":
            groups.reverse()
        elif kind == "in no param group":
            model.inlet.weight.requires_grad_(False)
        elif kind == "buffer 'table' of shape (3,)":
            model.table = model.table[:3]
        config |= DIFFERENT.get(kind, {})
    with pytest.raises(errors.ConfigError) as caught:
        zerobench.initialize(
            model, config=rank.config(**config), model_parameters=[{"params": group} for group in groups]
        )
    return str(caught.value)


DIFFERENT = {
    "stage 3": {"stage": 3},
    "gradient_clipping 1.0": {"gradient_clipping": 1.0},
    "lr': 0.5": {"optimizer": {"lr": 0.5}},
}


@pytest.mark.parametrize(
    "kind", [*DIFFERENT, "in param group 0", "in no param group", "blocks.3", "buffer 'table' of shape (3,)"]
)
def test_ranks_that_were_set_up_differently_say_what_differs(kind):
    told = ranks.run(differ, kind, timeout_s=60.0)
    assert told[0] == told[1]
    its_own, of_rank_0 = told[0].split(", and rank 0 has ")
    assert its_own.startswith("rank 1 was set up differently from rank 0: it has ")
    assert kind in its_own and kind not in of_rank_0


def compare_facts(rank, lists):
    config = zerobench.engine.config.parse(rank.config(timeout_s=TIMEOUT_S))
    place = topology.resolve(config, os.environ)
    connected = topology.make_communicators(_native.load(), config, place, environment=os.environ)
    try:
        expect_same_setup(connected.reduce, lists[rank.rank])
    except errors.ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([["a", "b"]] * 3, None),
        ([[]] * 3, None),
        (
            [["a", "b"], ["a", "b"], ["a"]],
            "rank 2 was set up differently from rank 0: it has nothing further, and ",
        ),
        (
            [["a"], ["a", "b"], ["a", "b"]],
            "rank 1 was set up differently from rank 0: it has b, and rank 0 has noth",
        ),
        (
            [["a", "b"], ["a", "c"], ["d", "b"]],
            "rank 2 was set up differently from rank 0: it has d, and rank 0 has a",
        ),
        ([["é" * 900], ["é" * 900 + "x"], ["é" * 900]], "give every rank the same model"),
    ],
)
def test_the_first_fact_that_differs_is_named(lists, said):
    for told in ranks.run(compare_facts, lists, world_size=3, timeout_s=60.0):
        assert told == said or said in told


def test_places_and_clocks_of_ranks_may_differ():
    for steps in ranks.run(train_from_another_place, timeout_s=60.0):
        assert steps == 1


def train_from_another_place(rank):
    config = rank.config(threads=1 + rank.rank, timeout_s=TIMEOUT_S + rank.rank, pin_threads=rank.rank == 0)
    engine = zerobench.initialize(zoo.make(CASE), config=config | {"stage": 2})
    zoo.run_plan(engine, CASE, 0, rank.rank, [])
    return engine.global_steps


def exit_without_closing(rank, stage):
    engine = start(rank, stage)
    zoo.run_plan(engine, CASE, 0, rank.rank, [])
    return engine.global_steps


def test_ranks_may_end_without_closing():
    assert ranks.run(exit_without_closing, 3, timeout_s=60.0) == [1, 1]
