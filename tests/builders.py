"""Settings, measured windows and models that many tests need, with a default for every field. Importing this imports no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerobench import models
from zerobench.bench.protocol.job import DeviceMemory, Window
from zerobench.strategies.base import StrategySettings

if TYPE_CHECKING:
    import torch
    from torch import nn

SMALL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_seq_length": 12, "vocab_size": 31}


def make_settings(*, rank: int = 0, world_size: int = 1, **fields) -> StrategySettings:
    """Return the settings of one rank, by default the only one. All ranks are on one host unless ``fields`` place them
    elsewhere."""
    defaults = {
        "local_rank": rank,
        "local_world_size": world_size,
        "rendezvous": "test",
        "precision": "fp32",
        "batch_size": 2,
        "seq_length": SMALL["max_seq_length"],
    }
    return StrategySettings(rank=rank, world_size=world_size, **{**defaults, **fields})


def make_window(
    step_times_ms: Sequence[float] = (10.0, 10.0),
    losses: Sequence[float] = (2.0, 1.0),
    *,
    peak_bytes: int = 100,
    **figures,
) -> Window:
    """Return one rank's measured window. ``peak_bytes`` is of its device, whose other figures ``memory`` sets."""
    defaults = {
        "began_s": 100.0,
        "ended_s": 101.0,
        "validation_loss": 1.5,
        "memory": DeviceMemory(peak_bytes=peak_bytes, allocated_bytes=50),
        "peak_host_bytes": 1000,
        "communication_bytes": {},
        "memory_bytes": {},
        "phases_ms": {},
        "threads": 1,
    }
    return Window(step_times_ms=step_times_ms, losses=losses, **{**defaults, **figures})


def tiny_model(seed: int = 0, *, device: str | torch.device | None = None, **shape) -> nn.Module:
    """Return the preset ``tiny``, with fields of ``shape`` in place of its own."""
    return models.build(models.resolve("tiny", shape), seed, device=device)
