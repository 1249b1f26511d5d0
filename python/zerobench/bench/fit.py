"""Whether a configuration can fit at all, before any process starts. A lower bound: activations, buffers and gathered
parameters come on top, so what passes here may still run out of memory, but what does not pass cannot fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerobench import models
from zerobench.bench.machine import memory_available_bytes
from zerobench.bench.plan import Configuration

GIB = 1 << 30
# Which of parameters, gradients and optimizer state every rank holds in full; the rest is divided among the ranks.
_REPLICATED = {
    "single": (True, True, True),
    "ddp": (True, True, True),
    "zero0": (True, True, True),
    "zero1": (True, True, False),
    "zero2": (True, False, False),
    "zero3": (False, False, False),
    "fsdp2": (False, False, False),
}
_REFERENCE_BYTES_PER_PARAMETER = (
    40  # 16 to train, and fp32 copies: first and last parameters, gradients, moments, a file
)


def least_rank_bytes(configuration: Configuration) -> int:
    """Bytes of parameters, gradients and optimizer state that one rank cannot do without."""
    settings = configuration.settings
    count = models.parameter_count(models.ModelConfig.model_validate(configuration.model))
    low = settings.precision != "fp32" and configuration.strategy != "ddp"
    parts = (2, 2, 12) if low else (4, 4, 8)
    replicated = _REPLICATED.get(configuration.strategy, (False, False, False))
    return sum(
        count * part // (1 if whole else settings.world_size)
        for part, whole in zip(parts, replicated, strict=True)
    )


def why_too_large(configuration: Configuration, *, rank_memory_bytes: int | None) -> str | None:
    """One sentence when the configuration cannot fit on this host, else None."""
    rank_bytes, ranks = least_rank_bytes(configuration), configuration.settings.world_size
    what = "parameters, gradients and optimizer state"
    if rank_memory_bytes is not None and rank_bytes > rank_memory_bytes:
        return (
            f"{what} alone need {rank_bytes / GIB:.2f} GiB on each rank and --rank-memory-gib allows "
            f"{rank_memory_bytes / GIB:.2f}: not started"
        )
    available = memory_available_bytes()
    if rank_bytes * ranks > available:
        return (
            f"{what} alone need {rank_bytes * ranks / GIB:.2f} GiB for {ranks} ranks and the host has "
            f"{available / GIB:.2f} GiB available: not started"
        )
    return None


def verification_model(model: Mapping[str, Any], *, rank_memory_bytes: int | None) -> dict[str, Any]:
    """The model itself, or the same with fewer layers where the reference would not fit."""
    available = memory_available_bytes()
    limit = available if rank_memory_bytes is None else min(available, rank_memory_bytes)
    config = models.ModelConfig.model_validate(dict(model))
    while config.num_layers > 1 and models.parameter_count(config) * _REFERENCE_BYTES_PER_PARAMETER > limit:
        config = config.model_copy(update={"num_layers": config.num_layers // 2})
    return config.model_dump()
