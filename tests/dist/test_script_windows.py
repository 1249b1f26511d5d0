"""Scripts whose windows have fewer micro-batches than configured, or another number on some ranks."""

from __future__ import annotations

import contextlib

import pytest
import script_runs
import torch
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

from zerobench.errors import CommunicationError, ConfigError, StateError

WINDOWS = (4, 1, 4, 2, 3)
ENDS = {
    "end_window": lambda engine: None,
    "boundary": lambda engine: engine.set_gradient_accumulation_boundary(True),
}


def short_windows(rank, place, precision, how):
    """Average over the micro-batches that there were, where a window ends before its time."""
    engine = start(rank, place, precision=precision, gradient_accumulation_steps=4)
    for step, num in enumerate(WINDOWS):
        engine.step(end_window=True)  # nothing to do
        assert engine.global_steps == step
        for micro in range(num):
            if micro == num - 1 and how == "boundary":
                engine.set_gradient_accumulation_boundary(True)
            assert engine.is_gradient_accumulation_boundary() == (
                micro == 3 or (how == "boundary" and micro == num - 1)
            )
            backward(engine, rank, step, micros=[micro])
            if micro < num - 1:
                engine.step()  # nothing to do
        engine.step(end_window=how == "end_window")
        engine.set_gradient_accumulation_boundary(None)
        assert engine.global_steps == step + 1
    found = end(engine)
    expect_close(found, plainly(rank.world_size, precision, micros=WINDOWS), precision)
    expect_same_everywhere(
        ("short", precision, rank.world_size, PLACES[place]["stage"] > 1), place, found["digest"]
    )
    return found["digest"]


def windows_of_one(rank, place, how):
    """End with the bits of a window of one micro-batch where one of four ends a window."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    for step in range(2):
        ENDS[how](engine)
        backward(engine, rank, step)
        with engine.gradients(None) if how == "boundary" else contextlib.nullcontext():
            pass
        engine.step(end_window=how == "end_window")
    assert end(engine)["digest"] == untouched(rank, place)


def long_windows(rank, place):
    """Raise StateError for a window longer than gradient_accumulation_steps, and for a boundary that is no bool."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    backward(engine, rank, 0)
    engine.step()
    with pytest.raises(StateError, match="more than 2 micro-batches"):
        backward(engine, rank, 0, micros=[1])
    engine.set_gradient_accumulation_boundary(None)
    backward(engine, rank, 0, micros=[1])
    with pytest.raises(StateError, match="more than 2 times without a step"):
        backward(engine, rank, 0, micros=[2])
    for wrong in (1, 0, "true", torch.tensor(True)):
        with pytest.raises(ConfigError, match="is_boundary"):
            engine.set_gradient_accumulation_boundary(wrong)
    engine.step()
    train(engine, rank, [1], micros=2)
    assert end(engine)["digest"] == untouched(rank, place, micros=2)


def ranks_of_other_lengths(rank, place, how):
    """Raise CommunicationError on every rank where windows end after different numbers of micro-batches."""
    if rank.world_size == 1:
        return
    # At stage 3 the longer window's forward waits for the other rank until time is over.
    engine = start(
        rank, place, gradient_accumulation_steps=4, timeout_s=1.0 if PLACES[place]["stage"] == 3 else 5.0
    )
    num = 1 if rank.rank == 0 else 2
    with pytest.raises(CommunicationError) as raised:
        backward(engine, rank, 0, micros=range(num - 1))
        ENDS[how](engine)
        backward(engine, rank, 0, micros=[num - 1])
        engine.step(end_window=how == "end_window")
        engine.get_global_grad_norm()
    if how == "end_window" and PLACES[place]["stage"] < 2:  # others reduce before the step finds out
        assert "backwards" in str(raised.value)
    engine.close()


def pending_windows(rank, place):
    """Raise StateError in full_state() while micro-batches wait for a step, and warn in close() with their number."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    for num in (1, 3):
        backward(engine, rank, 0, micros=range(num))
        with pytest.raises(StateError, match=rf"gradients of {num} micro-batch.*end_window=True"):
            engine.full_state()
        with pytest.raises(StateError, match=r"end_window=True"):
            engine.full_state(rank0_only=True)
        engine.step(end_window=True)
        assert engine.full_state()["step"] == engine.global_steps
    backward(engine, rank, 1, micros=range(2))
    engine.module.zero_grad()
    engine.full_state()
    backward(engine, rank, 1, micros=range(2))
    with noticed() as texts:
        engine.close()
    assert ["gradients of 2 micro-batches" in text for text in texts] == [True]
    with noticed() as texts:
        engine.close()
        other = start(rank, place, gradient_accumulation_steps=2)
        backward(other, rank, 0)
        other.zero_grad()
        other.close()
    assert not texts


def closing_after_a_drop(rank, place, how):
    """Close without a warning where the script has dropped the window, by whichever call."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    backward(engine, rank, 0)
    DROPS[how](engine)
    with noticed() as texts:
        engine.close()
    assert not texts


def windows_before_a_failure(rank, place):
    """End a window of what is left after an exception in a backward dropped its first micro-batches."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    backward(engine, rank, 7, micros=range(2))
    loss = engine(**CASE.batch(0, rank.rank, 0))
    loss.register_hook(lambda _: (_ for _ in ()).throw(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    assert all(p.grad is None for p in engine.module.parameters())
    for step in range(2):
        backward(engine, rank, step, micros=range(3))
        engine.step(end_window=True)
    expect_close(end(engine), plainly(rank.world_size, micros=(3, 3)))


CHECKS = [
    *((short_windows, (place, "fp32", how)) for how in ENDS for place in PLACES),
    *(
        (short_windows, (place, "bf16", "end_window"))
        for place in ("0", "1", "2", "3", "2 host", "3 all host")
    ),
    *((short_windows, (place, "fp16", how)) for how in ENDS for place in ("1", "3")),
    *((windows_of_one, (place, how)) for how in ENDS for place in PLACES),
    *((long_windows, (place,)) for place in PLACES),
    *(
        (ranks_of_other_lengths, (place, how))
        for how in ENDS
        for place in ("0", "1", "2", "1 host", "2 host")
    ),
    *((ranks_of_other_lengths, (place, "end_window")) for place in ("3", "3 all host")),
    *((pending_windows, (place,)) for place in PLACES),
    *((closing_after_a_drop, (place, how)) for how in DROPS for place in ("0", "3")),
    *((windows_before_a_failure, (place,)) for place in PLACES),
]


RUNS = script_runs.Runs(
    CHECKS,
    several_ranks=(ranks_of_other_lengths,),
    on_two_places=(long_windows, pending_windows),
    swapped=(short_windows,),
)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_with_short_windows(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)
