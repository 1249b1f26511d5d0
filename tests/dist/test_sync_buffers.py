"""``engine.sync_buffers()``: rank 0's statistics on every rank."""

from __future__ import annotations

import os

import pytest
import ranks
import small_models
import torch
import zoo

import zerobench
from zerobench.bench.launch.environments import free_ports
from zerobench.errors import ConfigError

PLACES = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, bf16": {"stage": 2, "precision": "bf16"},
    "stage 3, c10d": {"stage": 3, "communicator": "c10d"},
}


def start(rank, place, port=None):
    """Return an engine whose ranks have seen different batches, and its statistics."""
    if PLACES[place].get("communicator") == "c10d":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = small_models.Chain(2, block=small_models.NormBlock)
    model.register_buffer("own", torch.zeros(2), persistent=False)
    engine = zerobench.initialize(model, config=rank.config(**PLACES[place]))
    for step in range(2):
        engine.backward(engine(**zoo.points(step, rank.rank)))
        engine.step()
    model.own += rank.rank
    return engine


def buffers_of(engine):
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def evaluated(engine):
    engine.eval()
    with torch.no_grad():
        loss = engine(**zoo.points(9, 0)).item()
    engine.train()
    return loss


def synchronised(rank, place, port=None):
    """Return buffers and a loss before and after, and the loss of a step that follows."""
    engine = start(rank, place, port)
    before, loss_before = buffers_of(engine), evaluated(engine)
    engine.sync_buffers()
    after, loss_after = buffers_of(engine), evaluated(engine)
    engine.backward(engine(**zoo.points(3, rank.rank)))
    engine.step()
    assert engine.global_steps == 3
    engine.close()
    return before, loss_before, after, loss_after


@pytest.mark.parametrize("place", PLACES)
def test_rank_0s_buffers_become_everybodys(place):
    first, second = ranks.run(synchronised, place, free_ports(1)[0])
    before, after = first[0], second[2]
    mean = "blocks.0.norm.running_mean"
    assert not torch.equal(before[mean], second[0][mean])
    assert first[1] != second[1]
    assert before.keys() == after.keys()
    for name, buffer in before.items():
        assert torch.equal(first[2][name], buffer), name
        if name != "own":
            assert torch.equal(after[name], buffer) and after[name].dtype == buffer.dtype, name
    assert first[3] == second[3] == first[1]


def test_buffers_outside_of_a_state_stay_each_ranks_own():
    first, second = ranks.run(synchronised, "stage 2")
    assert first[2]["own"].tolist() == [0, 0] and second[2]["own"].tolist() == [1, 1]


@pytest.mark.parametrize("place", ["stage 0", "stage 3"])
def test_one_rank_keeps_its_buffers(place):
    ((before, loss_before, after, loss_after),) = ranks.run(synchronised, place, world_size=1)
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    assert loss_before == loss_after


def different(rank):
    engine = start(rank, "stage 2")
    if rank.rank == 1:
        engine.module.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"buffers of rank 1 differ from rank 0's"):
        engine.sync_buffers()
    engine.close()


def test_different_buffers_are_an_error_on_every_rank():
    ranks.run(different)
