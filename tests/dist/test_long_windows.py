"""Sums of many micro-batches in bf16 are those of float32, at every stage and wherever the state is."""

from __future__ import annotations

import pytest
import ranks
import torch
from torch import nn

import zerobench

STAGES = (0, 1, 2, 3)
LENGTHS = (512, 2048)  # bf16 sums of so many equal micro-batches are x 0.74 and x 0.19 of the right ones


def train(rank: ranks.Rank, micro_batches: int, stage: int, **config) -> dict:
    """A step of equal micro-batches, other ones on each rank."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank.rank))
    engine = zerobench.initialize(
        model, config=rank.config(stage=stage, gradient_accumulation_steps=micro_batches, **config)
    )
    for _ in range(micro_batches):
        engine.backward(engine(batch).float().pow(2).mean())
    engine.step()
    found = {
        "norm": engine.get_global_grad_norm(),
        "dtypes": engine.dtypes(),
        "parameters": {name: value.tolist() for name, value in engine.full_parameters().items()},
    }
    engine.close()
    return found


def train_all(rank: ranks.Rank) -> dict:
    found = {"float32": train(rank, 1, 0)}
    for micro_batches in LENGTHS:
        for stage in STAGES:
            found[micro_batches, stage] = train(rank, micro_batches, stage, precision="bf16")
    host = {"precision": "bf16", "offload_optimizer": {"device": "cpu", "threads": 1}}
    found["host"] = train(rank, LENGTHS[0], 2, **host)
    return found


@pytest.fixture(scope="module", params=[1, 2])
def found(request):
    return ranks.run(train_all, world_size=request.param)[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro_batches", LENGTHS)
def test_the_norm_is_that_of_float32(found, micro_batches, stage):
    assert found[micro_batches, stage]["dtypes"]["accumulate"] == "float32"
    assert found[micro_batches, stage]["norm"] == pytest.approx(found["float32"]["norm"], rel=0.005)


def test_stages_that_reduce_alike_end_with_the_same_bits(found):
    for micro_batches in LENGTHS:
        for one, other in ((0, 1), (2, 3)):
            assert found[micro_batches, one] == found[micro_batches, other]


def test_state_on_the_host_ends_with_the_same_bits(found):
    assert found["host"] == found[LENGTHS[0], 2]
