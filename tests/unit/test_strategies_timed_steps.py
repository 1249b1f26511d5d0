"""Timed steps of peers do nothing that a user of theirs would leave out."""

from __future__ import annotations

import pytest
import torch
from test_strategies import make_batches, make_model, make_settings

from zerobench import strategies
from zerobench.bench.environments import free_ports
from zerobench.strategies import ddp, peer
from zerobench.strategies.flight_recorder import recorded


@pytest.fixture
def own_process_group(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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


def test_masters_beside_ddp_are_counted_once(own_process_group, monkeypatch):
    strategy = built("ddp_master", precision="bf16")
    strategy.step(make_batches())
    counted = strategy.memory_bytes()["device"]["gradients"]
    for module in (ddp, peer):
        monkeypatch.setattr(module, "storage_bytes", lambda tensors: pytest.fail("counted in a timed step"))
    strategy.step(make_batches())
    monkeypatch.undo()
    assert counted == (2 + 4) * sum(p.numel() for p in strategy.module().parameters())
    strategy.close()
