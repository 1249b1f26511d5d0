"""Timed steps of peers do nothing that a user of theirs would leave out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from builders import make_settings
from test_strategies import make_batches, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from zerobench import strategies
from zerobench.strategies import shared
from zerobench.strategies.flight_recorder import recorded
from zerobench.strategies.megatron_fsdp import MegatronFSDP3Strategy


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do, and to how many tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.tensors: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        self.tensors[str(func)] += len(args[0]) if isinstance(args[0], list | tuple) else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def calls_of(function: Callable[..., object]) -> Iterator[list[str]]:
    """Fill a list with the names of the functions that call ``function``."""
    callers: list[str] = []

    def watch(frame, event, _):
        if event == "call" and frame.f_code is function.__code__:
            callers.append(frame.f_back.f_code.co_name)

    sys.setprofile(watch)
    try:
        yield callers
    finally:
        sys.setprofile(None)


def built(name, factory=make_model, **fields):
    strategy = strategies.get(name)(make_settings(**fields))
    strategy.build(factory)
    return strategy


def model_with_a_buffer(*, device=None):
    model = make_model(device=device)
    model.register_buffer("frequencies", torch.rand(3))
    return model


@pytest.mark.parametrize("name", ["ddp", "ddp_compress", "ddp_master"])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_ddp_reduces_gradients_and_sends_nothing_else(own_process_group, name, grad_accum):
    strategy = built(name, model_with_a_buffer, precision="bf16", grad_accum=grad_accum)
    for _ in range(3):  # the order of buckets is agreed upon in one of the first
        strategy.step(make_batches(grad_accum))
    before = len(recorded()[0])
    strategy.step(make_batches(grad_accum))
    names = [entry["profiling_name"] for entry in recorded()[0][before:]]
    strategy.close()
    assert set(names) == {"gloo:all_reduce"}


def test_masters_beside_ddp_are_counted_once(own_process_group):
    strategy = built("ddp_master", precision="bf16")
    with calls_of(shared.storage_bytes) as first_step:
        strategy.step(make_batches())
    counted = strategy.memory_bytes()["device"]["gradients"]
    with calls_of(shared.storage_bytes) as timed_step:
        strategy.step(make_batches())
    assert first_step == ["_held_gradient_bytes"] and not timed_step
    assert counted == (2 + 4) * sum(p.numel() for p in strategy.module().parameters())
    strategy.close()


class GivenParts(MegatronFSDP3Strategy):
    """The strategy with parts of parameters that nothing has sharded."""

    def __init__(self, settings, parts):
        super().__init__(settings)
        self._parts = parts

    def _named_parameters(self):
        return self._parts


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_megatron_fsdp_clips_all_gradients_at_once(own_process_group, clip):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)

    def clipped(parameter_num):
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(5, generator=generator) for _ in range(parameter_num)]
        expected = [torch.nn.Parameter(torch.zeros(5)) for _ in gradients]
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(expected, float("inf") if clip is None else clip)
        parts = {str(index): SimpleNamespace(grad=gradient) for index, gradient in enumerate(gradients)}
        strategy = GivenParts(make_settings(clip=clip), parts | {"no part": SimpleNamespace(grad=None)})
        with Operations() as operations:
            found = strategy._clip(clip)
        torch.testing.assert_close(found, norm)
        torch.testing.assert_close(gradients, [parameter.grad for parameter in expected])
        return operations.calls

    assert clipped(40) == clipped(2)


def test_norms_on_the_host_are_of_as_many_tensors_whatever_the_size():
    def tensors(numel):
        tensor = torch.linspace(0, 1, numel)
        with Operations() as operations:
            norm = shared.total_norm([tensor])
        assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=1e-6)
        return operations.tensors

    assert tensors(1 << 22) == tensors((1 << 16) + 3) == tensors(7)
