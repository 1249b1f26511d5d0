"""Faults that a training engine meets on CPU ranks (tests/dist) and on GPUs (tests/gpu) alike."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ranks
import small_models
import torch
import zoo

import zerobench
from zerobench import errors

CASE = zoo.Case(small_models.Chain, steps=4)
VICTIM = 1  # the rank at fault, where there are two
SCALE = 2.0**8  # of the loss in fp16: no gradient of CASE overflows
# How a lost rank is told: by a collective of a unit, or by what hosts exchange at the end of a pass (stage 3).
NAMES_THE_DEAD = re.compile(
    rf"rank {VICTIM} died during (?:"
    r"(?:wait_source_free of )?(?:reduce_scatter|all_gather) of '(?:root|blocks\.\d)'"
    r"|exchange of '(?:training forward|backward)'"
    r") \(noticed by rank 0\)"
)


@contextmanager
def training(
    rank: ranks.Rank,
    stage: int,
    *,
    case: zoo.Case = CASE,
    device: str = "cpu",
    timeout_s: float = 60.0,
    **config: Any,
) -> Iterator[Any]:
    model = zoo.make(case).to(device)
    settings = rank.config(stage=stage, timeout_s=timeout_s, **(zoo.optimizer_config(case) | config))
    engine = zerobench.initialize(model, config=settings)
    try:
        yield engine
    finally:
        engine.close()


def goes_on(
    engine: Any,
    rank: ranks.Rank,
    stage: int,
    *,
    done: int = 0,
    case: zoo.Case = CASE,
    device: str = "cpu",
    **config: Any,
) -> None:
    """The rest of the training ends where an undisturbed one does."""
    for step in range(done, case.steps):
        zoo.run_plan(engine, case, step, rank.rank, [], device)
    expected = undisturbed(rank, stage, case=case, device=device, **config)
    assert zoo.state_of(engine)["digest"] == expected["digest"]


def undisturbed(
    rank: ranks.Rank, stage: int, *, case: zoo.Case = CASE, device: str = "cpu", **config: Any
) -> dict[str, Any]:
    with training(rank, stage, case=case, device=device, **config) as engine:
        for step in range(case.steps):
            zoo.run_plan(engine, case, step, rank.rank, [], device)
        return zoo.state_of(engine)


def backward_with_a_nan(engine: Any, rank: ranks.Rank, batch: zoo.Batch) -> torch.Tensor:
    """On the last rank the gradient of one parameter is NaN, elsewhere none is. The loss."""
    is_at_fault = rank.rank == rank.world_size - 1
    spoil = engine.module.blocks[1].up.bias.register_hook(lambda g: g * float("nan") if is_at_fault else g)
    loss = engine(**batch)
    engine.backward(loss)
    spoil.remove()
    return loss


def assert_same_state(engine: Any, before: dict[str, Any]) -> None:
    now = zoo.state_of(engine)
    assert (now["digest"], now["served"]) == (before["digest"], before["served"])


def not_a_number(rank: ranks.Rank, stage: int, precision: str, device: str = "cpu", **config: Any) -> None:
    """All ranks raise in the same call, which on CUDA is the next step's, and nothing is updated in between."""
    settings = {"precision": precision, "device": device, **config}
    with training(rank, stage, **settings) as engine:
        zoo.run_plan(engine, CASE, 0, rank.rank, [], device)
        before = zoo.state_of(engine)
        batch = zoo.on_device(zoo.points(1, rank.rank), device)
        loss = backward_with_a_nan(engine, rank, batch)
        if device != "cpu":
            engine.step()
            again = engine(**batch)
            assert again.item() == loss.item()
            engine.backward(again)
        with pytest.raises(errors.NonFiniteGradientError, match=r"'blocks\.1'.* step 2.*nothing was updated"):
            engine.step()
        assert_same_state(engine, before)
        goes_on(engine, rank, stage, done=1, **settings)


def not_a_number_in_fp16(rank: ranks.Rank, stage: int, device: str = "cpu", **config: Any) -> None:
    """All ranks skip the step and halve the loss scale."""
    settings = {"precision": "fp16", "loss_scale": {"initial_scale": SCALE}, "device": device, **config}
    with training(rank, stage, **settings) as engine:
        zoo.run_plan(engine, CASE, 0, rank.rank, [], device)
        before = zoo.state_of(engine)
        backward_with_a_nan(engine, rank, zoo.on_device(zoo.points(1, rank.rank), device))
        engine.step()
        assert engine.was_step_skipped() and not engine.was_step_applied()
        assert (engine.global_steps, engine.loss_scale) == (1, SCALE / 2)
        assert_same_state(engine, before)
        for step in range(1, CASE.steps):
            zoo.run_plan(engine, CASE, step, rank.rank, [], device)
            assert engine.was_step_applied()
        assert (engine.global_steps, engine.loss_scale) == (CASE.steps, SCALE / 2)
        found = zoo.state_of(engine)["parameters"]
    expected = undisturbed(rank, stage, **settings)["parameters"]
    # With half the scale the smallest gradients round otherwise.
    origin = {name: p.detach() for name, p in zoo.make(CASE).named_parameters()}
    assert zoo.relative(found, expected, origin) < 0.05


def killed_in_backward(rank: ranks.Rank, stage: int, device: str = "cpu", **config: Any) -> dict[str, Any]:
    """One of two ranks is killed when its third backward has come to the middle block; what the other has to say."""
    with training(rank, stage, device=device, **config) as engine:
        for step in range(20):
            if rank.rank == VICTIM and step == 2:
                engine.module.blocks[1].up.weight.register_hook(
                    lambda _: os.kill(os.getpid(), signal.SIGKILL)
                )
            try:
                zoo.run_plan(engine, CASE, step, rank.rank, [], device)
            except errors.CommunicationError as error:
                return {"step": step} | after_the_loss(engine, rank, error, device=device)
    raise AssertionError("went on without the other rank")


def after_the_loss(
    engine: Any,
    rank: ranks.Rank,
    error: errors.CommunicationError,
    *,
    case: zoo.Case = CASE,
    device: str = "cpu",
) -> dict[str, Any]:
    """Every further collective call raises the same cause at once, closing neither hangs nor raises, and the device
    can be used on."""

    def train() -> None:
        zoo.run_plan(engine, case, 0, rank.rank, [], device)

    began = time.monotonic()
    again = []
    for call in (train, engine.state_dict if engine.config.stage == 3 else train):
        try:
            call()
        except errors.CommunicationError as repeated:
            again.append(str(repeated))
    engine.close()
    closing_s = time.monotonic() - began
    assert torch.ones(1000, device=device).sum().item() == 1000
    return {"error": str(error), "rank": error.rank, "again": again, "closing_s": closing_s}
