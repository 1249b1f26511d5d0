"""Scripts that drop gradients, in each of the ways that PyTorch scripts have."""

from __future__ import annotations

import pytest
import script_runs
from noticed import noticed
from script_engines import (
    CASE,
    DROPS,
    PLACES,
    backward,
    end,
    expect_close,
    expect_same_everywhere,
    plainly,
    start,
    train,
    untouched,
)

from zerobench.errors import CommunicationError, StateError


def dropping_nothing(rank, place, precision):
    """Do nothing where no gradient is held: before the first step, after each step, and twice."""
    engine = start(rank, place, precision=precision)
    for step in range(2):
        for drop in DROPS.values():
            drop(engine)
            drop(engine)
        train(engine, rank, [step])
        for drop in DROPS.values():
            drop(engine)
    assert end(engine)["digest"] == untouched(rank, place, precision=precision)


def spoilt(batch, kind):
    return {**batch, "x": batch["x"] * {"large": 1e3, "not a number": float("nan")}[kind]}


def dropping(rank, place, precision, kind):
    """Drop a bad micro-batch and what came before it, wherever in the window it is, and train on as without it."""
    engine = start(rank, place, precision=precision, gradient_accumulation_steps=4)
    for step, (how, drop) in enumerate(DROPS.items()):
        before = step % 4
        backward(engine, rank, 50 + step, micros=range(before))
        engine.backward(engine(**spoilt(CASE.batch(step, rank.rank, 9), kind)))
        drop(engine)
        for micro in range(4):
            backward(engine, rank, step, micros=[micro])
            assert engine.is_gradient_accumulation_boundary() == (micro >= 2), how
            engine.step()
    found = end(engine)
    steps = len(DROPS)
    assert found["digest"] == untouched(rank, place, micros=4, steps=steps, precision=precision)
    expect_close(found, plainly(rank.world_size, precision, micros=(4,) * steps), precision)
    expect_same_everywhere(
        ("dropping", precision, rank.world_size, PLACES[place]["stage"] > 1), place, found["digest"]
    )
    return found["digest"]


def boundary_after_a_drop(rank, place):
    """Count micro-batches from the drop on, also before the next forward."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    for how, drop in DROPS.items():
        backward(engine, rank, 0)
        assert engine.is_gradient_accumulation_boundary()
        drop(engine)
        assert not engine.is_gradient_accumulation_boundary(), how
        backward(engine, rank, 0)
        engine.step()
        assert engine.global_steps == 0, how
        engine.zero_grad()
    engine.close()


def ranks_disagree(rank, place, how):
    """Raise the step's CommunicationError where one rank dropped its window and others did not."""
    if rank.world_size == 1:
        return
    engine = start(rank, place, gradient_accumulation_steps=4, timeout_s=5.0)
    train(engine, rank, [0], micros=4)
    backward(engine, rank, 1, micros=range(2))
    if rank.rank == rank.world_size - 1:
        DROPS[how](engine)
    backward(engine, rank, 1, micros=[2])
    with pytest.raises(CommunicationError, match=r"gradients of \d backwards"):
        engine.step(end_window=True)
    engine.close()


def ranks_disagree_on_a_whole_window(rank, place):
    """Raise CommunicationError where one rank dropped a whole window and made another."""
    if rank.world_size == 1:
        return
    engine = start(rank, place, timeout_s=1.0 if PLACES[place]["stage"] == 3 else 5.0)
    train(engine, rank, [0])
    backward(engine, rank, 1)
    if rank.rank == 0:
        engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises((CommunicationError, StateError)) as raised:
        if rank.rank == 0:
            backward(engine, rank, 1)
        engine.step()
        engine.get_global_grad_norm()
    assert isinstance(raised.value, CommunicationError), raised.value
    with pytest.raises(CommunicationError):
        backward(engine, rank, 2)
    engine.close()


def dropping_before_each(rank, place, how):
    """Warn once a window was dropped as often as it has micro-batches, since no step will come."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    for micro in range(4):
        DROPS[how](engine)
        with noticed() as texts:
            backward(engine, rank, 0, micros=[micro])
            engine.step()
        assert not texts
    assert engine.global_steps == 0
    with noticed() as texts:
        DROPS[how](engine)
    assert ["4 unfinished windows" in text for text in texts] == [True] * (rank.rank == 0)
    with noticed() as texts:
        train(engine, rank, range(2), micros=4)
        backward(engine, rank, 5)
        engine.zero_grad()  # the count begins again
    assert not [text for text in texts if "a step takes" not in text]  # the disk of the tests is slow
    assert end(engine)["digest"] == untouched(rank, place, micros=4)


def dropping_inside(rank, place):
    """Raise StateError for a drop inside a forward, and nothing else happens to it."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    backward(engine, rank, 0)
    handle = engine.module.blocks[1].register_forward_pre_hook(lambda *_: engine.zero_grad())
    with pytest.raises(StateError, match="inside a forward or backward"):
        engine(**CASE.batch(0, rank.rank, 1))
    handle.remove()
    engine.zero_grad()
    train(engine, rank, range(2), micros=2)
    assert end(engine)["digest"] == untouched(rank, place, micros=2)


CHECKS = [
    *((dropping_nothing, (place, "fp32")) for place in PLACES),
    *((dropping_nothing, (place, "bf16")) for place in ("2", "3 all host")),
    *((dropping, (place, "fp32", "large")) for place in PLACES),
    *((dropping, (place, "fp32", "not a number")) for place in PLACES),
    *((dropping, (place, "bf16", "large")) for place in PLACES),
    *((dropping, (place, "fp16", "not a number")) for place in ("0", "3", "1 host")),
    *((boundary_after_a_drop, (place,)) for place in ("0", "3")),
    *((ranks_disagree, (place, "engine.zero_grad")) for place in PLACES),
    *(
        (ranks_disagree, (place, how))
        for place in ("0", "3")
        for how in ("module.zero_grad", "another optimizer's")
    ),
    *((ranks_disagree_on_a_whole_window, (place,)) for place in ("0", "1", "2", "3", "2 host")),
    *((dropping_before_each, (place, "engine.zero_grad")) for place in PLACES),
    *((dropping_before_each, (place, "optimizer.zero_grad")) for place in ("0", "3")),
    *((dropping_inside, (place,)) for place in PLACES),
]


RUNS = script_runs.Runs(
    CHECKS,
    several_ranks=(ranks_disagree,),
    on_two_places=(dropping_nothing, dropping_before_each, dropping_inside),
    swapped=(dropping,),
)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_drop_gradients(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)
