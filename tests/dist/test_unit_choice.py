"""Gather slots of units that were found by structure, and the notice of a large unit."""

from __future__ import annotations

import warnings

import pytest
import ranks
import torch
from noticed import noticed
from torch import nn

import zerobench


class Towers(nn.Module):
    """A stack of layers for queries and, with two towers, one for candidates."""

    def __init__(self, towers: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, 0.0) for _ in range(12)))
            for _ in range(towers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(tower(x).square().mean() for tower in self.towers)


def slots_of_towers(rank: ranks.Rank, num: int, units: str | list[str]) -> tuple[int, int]:
    """Return the bytes of a rank's gather slots in a step, and those of the largest unit."""
    config = rank.config(stage=3, units=units)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        engine = zerobench.initialize(Towers(num), config=config)
    engine.backward(engine(torch.ones(2, 3, 32)))
    engine.step()
    largest = max(unit["gather_bytes"] for unit in engine.units())
    slots = engine.memory_bytes()["device"]["gather_slots"]
    engine.close()
    return slots, largest


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_slots_of_towers_are_those_of_two_layers(towers):
    layer_bytes = 4 * sum(p.numel() for p in nn.TransformerEncoderLayer(32, 2, 64).parameters())
    for slots, largest in ranks.run(slots_of_towers, towers, "auto"):
        assert layer_bytes <= largest < layer_bytes + 2 * 256  # filled up to be divisible
        assert slots == 2 * largest


def told(rank: ranks.Rank, stage: int, units: str | list[str]) -> list[str]:
    """Return what an engine over a model of 65 MiB warns of."""
    model = nn.Sequential(*(nn.Linear(1, width << 18, bias=False) for width in (22, 22, 21)))
    with noticed() as texts:
        zerobench.initialize(model, config=rank.config(stage=stage, units=units)).close()
    return texts


@pytest.mark.parametrize(
    ("stage", "units", "is_told"), [(3, "auto", True), (3, [], False), (2, "auto", False)]
)
def test_a_large_unit_is_told_once(stage, units, is_told):
    first, second = ranks.run(told, stage, units)
    assert second == []
    assert len(first) == is_told
    assert all("unit 'root' takes 65.0 MiB, 100% of the model" in text for text in first)
