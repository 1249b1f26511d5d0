"""A training script as users write it: it leaves the engine's ranks to what started it. Run it under a launcher, or
call ``train_all`` in a process that has its place already."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerobench

STAGES = (0, 2, 3)
COMMUNICATORS = ("auto", "c10d")
NUM_STEPS = 3
ADAMW = {"lr": 1e-2, "weight_decay": 0.01}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch_of(number: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * number + step))


def train(number: int, *, process_group: Any = None, **config: Any) -> dict[str, Any]:
    """Train on the data of rank ``number`` and return what came of it."""
    given = {"optimizer": {"type": "adamw", **ADAMW}, "threads": 1, "pin_threads": False, "timeout_s": 30.0}
    engine = zerobench.initialize(make_model(), config=given | config, process_group=process_group)
    for step in range(NUM_STEPS):
        engine.backward(engine(batch_of(number, step)).square().mean())
        engine.step()
    place = engine.topology
    result = {
        "parameters": engine.state_dict(),
        "place": (place.rank, place.world_size, place.local_rank, place.local_world_size),
        "launched": place.launched,
        "communicator": engine.communicator,
        "update_cpus": engine.update_cpus,
    }
    engine.close()
    return result


def train_all(number: int, **given: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Train with every communicator and stage, one engine after the other."""
    return {
        (communicator, stage): train(number, communicator=communicator, stage=stage, **given)
        for communicator in COMMUNICATORS
        for stage in STAGES
    }


def plain_training(numbers: list[int]) -> dict[str, torch.Tensor]:
    """Parameters that plain PyTorch gets by averaging over the data of these ranks."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [model(batch_of(number, step)).square().mean() for number in numbers]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model.state_dict()


def main(folder: str, how: str) -> None:
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    if "group" in how:
        torch.distributed.init_process_group("gloo")
    result = train(number, threads=None, pin_threads=True) if "cpus" in how else train_all(number)
    torch.save(result, Path(folder) / f"{number}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
