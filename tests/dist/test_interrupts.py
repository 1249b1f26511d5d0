"""Signals that come while a rank waits for another inside the core: their handlers run, and what they raise ends it."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import engine_faults
import pytest
import ranks
import zoo

from zerobench import errors

CASE = engine_faults.CASE
SOON_S = 2.0  # and what a loaded machine takes on top
GRACE_S = 10.0
WAITS = 0  # the rank that gets the signal; the other one is late


def train(engine, rank, step=1):
    zoo.run_plan(engine, CASE, step, rank.rank, [])


def forward(engine, rank):
    engine(**zoo.points(1, rank.rank))


def gather(engine, rank):
    with engine.gather(modifier_rank=0):
        pass


def full_state(engine, rank):
    engine.full_state()


# At which stages one rank waits there for another.
CALLS = {
    "forward": (3,),
    "backward": (0, 1, 2, 3),
    "step": (0, 3),
    "gather": (0, 3),
    "full_state": (1, 3),
    "load_full_state": (0, 3),
}


def late_call(name, engine, rank):
    """Both ranks do what comes before the call, which is returned."""
    if name == "backward":
        loss = engine(**zoo.points(1, rank.rank))
        return lambda: engine.backward(loss)
    if name == "step":
        engine.backward(engine(**zoo.points(1, rank.rank)))
        return engine.step
    if name == "load_full_state":
        state = engine.full_state()
        return lambda: engine.load_full_state(**state)
    calls = {"forward": forward, "gather": gather, "full_state": full_state}
    return lambda: calls[name](engine, rank)


def await_file(path, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


def interrupted(rank, name, stage, folder):
    """One rank is interrupted in the call. When it has left it, the other comes."""
    waiting, gone = Path(folder) / "waiting", Path(folder) / "gone"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with engine_faults.training(rank, stage) as engine:
        train(engine, rank, step=0)
        call = late_call(name, engine, rank)
        if rank.rank != WAITS:
            await_file(gone)
            return engine_faults.after_the_loss(engine, rank, failure_of(call, errors.CommunicationError))
        waiting.touch()
        error = failure_of(call, KeyboardInterrupt)
        ended = time.monotonic()
        again = failure_of(lambda: train(engine, rank), errors.CommunicationError)
        gone.touch()
    return {"ended": ended, "type": type(error).__name__, "again": str(again)}


def failure_of(call, kind):
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert kind is KeyboardInterrupt or time.monotonic() - began < SOON_S + GRACE_S
    return caught.value


@pytest.mark.parametrize(("name", "stage"), [(n, s) for n, stages in CALLS.items() for s in stages])
def test_ctrl_c_ends_a_wait_and_the_peer_learns_why(tmp_path, name, stage):
    with ranks.Group(interrupted, name, stage, str(tmp_path)) as group:
        await_file(tmp_path / "waiting")
        time.sleep(0.7)
        sent = time.monotonic()
        group.kill(WAITS, signal.SIGINT)
        group.wait(timeout_s=50.0)
        first, second = group.outcomes
        assert first.error is None and second.error is None, f"{first.error}\n{second.error}"
    assert first.value["ended"] - sent < SOON_S + GRACE_S
    for text in (first.value["again"], second.value["error"], *second.value["again"]):
        assert text.startswith("rank 0 ") and "interrupted by KeyboardInterrupt" in text
    assert second.value["rank"] == WAITS


def handled(rank, stage, folder):
    """The handler of one rank's signal returns. How both ranks end, and what it saw."""
    waiting, seen = Path(folder) / "waiting", []

    def handle(number, frame):
        with pytest.raises(errors.StateError, match="signal's handler called the engine"):
            engine.global_steps  # noqa: B018
        seen.append(time.monotonic())

    signal.signal(signal.SIGUSR1, handle)
    with engine_faults.training(rank, stage) as engine:
        for step in range(CASE.steps):
            if step == 2 and rank.rank == WAITS:
                waiting.touch()
            elif step == 2:
                await_file(waiting)
                time.sleep(3.0)
            late_at = time.monotonic()
            train(engine, rank, step)
        return {"seen": seen, "late_at": late_at} | {"end": zoo.state_of(engine)["digest"]}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_handler_that_returns_runs_in_the_wait_which_goes_on(tmp_path, stage):
    with ranks.Group(handled, stage, str(tmp_path)) as group:
        await_file(tmp_path / "waiting")
        for _ in range(2):
            time.sleep(0.7)
            group.kill(WAITS, signal.SIGUSR1)
        group.wait()
        first, second = (outcome.value for outcome in group.outcomes)
        assert first and second, group.outcomes
    assert len(first["seen"]) == 2
    undisturbed = ranks.run(engine_faults.undisturbed, stage)
    assert [first["end"], second["end"]] == [state["digest"] for state in undisturbed]


def meeting(rank, folder):
    """The last of three ranks does not come before another one is interrupted and gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    if rank.rank == 2:
        time.sleep(60.0)
    (Path(folder) / str(rank.rank)).touch()
    try:
        with engine_faults.training(rank, 0):
            pass
    except (errors.CommunicationError, KeyboardInterrupt, SystemExit) as error:
        return type(error).__name__, str(error), time.monotonic()


@pytest.mark.parametrize(
    ("number", "victim", "raised", "told"),
    [
        (
            signal.SIGINT,
            0,
            "KeyboardInterrupt",
            "rank 0 was interrupted by KeyboardInterrupt while ranks connected",
        ),
        (signal.SIGTERM, 0, "SystemExit", "rank 0 was interrupted by SystemExit while ranks connected"),
        (signal.SIGINT, 1, "KeyboardInterrupt", "rank 1 died or left while ranks connected"),
    ],
)
def test_a_signal_ends_the_wait_for_ranks_that_have_not_come(tmp_path, number, victim, raised, told):
    with ranks.Group(meeting, str(tmp_path), world_size=3) as group:
        for rank in (0, 1):
            await_file(tmp_path / str(rank))
        time.sleep(1.0)
        sent = time.monotonic()
        group.kill(victim, number)
        group.wait((0, 1), timeout_s=50.0)
        found = [outcome.value for outcome in group.outcomes[:2]]
        assert all(found), group.outcomes
    assert found[victim][0] == raised
    assert found[1 - victim][:2] == ("CommunicationError", told)
    assert all(ended - sent < SOON_S + GRACE_S for _, _, ended in found)
