"""Every cell of the support matrix trains on two ranks, or is refused, as the page says."""

from __future__ import annotations

from typing import Any

import pytest
import support
import torch
from ranks import Rank, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerobench
from zerobench.errors import ConfigError


class Block(nn.Module):
    """A linear layer with an adapter next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.base(x)) + self.adapter(x)


class Net(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def train(rank: Rank, config: dict[str, Any], scripts: set[str]) -> None:
    """Train two steps. Parameters must end the same on both ranks and differ from the first ones."""
    torch.manual_seed(0)
    model = Net(checkpoints="checkpointing" in scripts)
    if "peft" in scripts:
        for block in model.blocks:
            block.base.requires_grad_(False)
    if "block" in scripts:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="eager")
    first = model.head.weight.detach().clone().float()
    engine = zerobench.initialize(model=model, config=rank.config(**config))
    try:
        if "whole" in scripts:
            engine.compile(backend="eager")
        x = torch.ones(2, 8) * (rank.rank + 1)
        for _ in range(2 * config.get("gradient_accumulation_steps", 1)):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        weight = engine.full_parameters()["head.weight"]
        assert weight.isfinite().all() and not torch.equal(weight, first)
    finally:
        engine.close()


def walk(rank: Rank, cells: list[tuple[tuple[str, ...], int, bool]], swap: str) -> list[str]:
    """Return what went otherwise than the table says. Cells are features, a stage, and whether it works."""
    unexpected = []
    for number, (names, stage, works) in enumerate(cells):
        torch._dynamo.reset()
        features = [support.FEATURES[name] for name in names]
        config: dict[str, Any] = {"stage": stage, "rendezvous": f"{rank.meeting_point}-{number}"}
        for feature in features:
            config |= feature.config
        if config.get("offload_optimizer", {}).get("nvme_path"):
            config["offload_optimizer"] = config["offload_optimizer"] | {"nvme_path": swap}
        try:
            train(rank, config, {feature.script for feature in features})
            refusal = None
        except ConfigError as error:
            refusal = str(error)
        except Exception as error:
            unexpected.append(f"{names} at stage {stage}: {type(error).__name__}: {error}")
            continue
        if works is not (refusal is None):
            unexpected.append(f"{names} at stage {stage}: {refusal or 'trains'}")
    return unexpected


def walk_with_group(rank: Rank, cells: list[tuple[tuple[str, ...], int, bool]], swap: str) -> list[str]:
    """Walk with a process group, which the communicator across hosts needs."""
    store = torch.distributed.FileStore(f"{swap}/store", rank.world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    try:
        return walk(rank, cells, swap)
    finally:
        torch.distributed.destroy_process_group()


def test_stages_take_the_features_that_the_table_says(tmp_path) -> None:
    cells = [
        ((name,), stage, stage in feature.stages)
        for name, feature in support.FEATURES.items()
        for stage in support.STAGES
    ]
    assert run(walk_with_group, cells, str(tmp_path)) == [[], []]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pairs_train_together_unless_the_table_refuses_them(tmp_path) -> None:
    cells = [
        (pair, stage, frozenset(pair) not in support.REFUSED)
        for pair in support.pairs()
        for stage in support.common_stages(*pair)
    ]
    assert run(walk_with_group, cells, str(tmp_path), timeout_s=1700) == [[], []]
