"""Whether a configuration can fit at all, before any process starts. A lower bound: activations, buffers and gathered
parameters come on top, so what passes here may still run out of memory, but what does not pass cannot fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerobench import models
from zerobench.bench.gpus import Gpu
from zerobench.bench.machine import memory_available_bytes
from zerobench.bench.plan import Configuration
from zerobench.models.hf_config import RANDOM_WEIGHTS

GIB = 1 << 30
# Which of parameters, gradients and optimizer state every rank holds in full at a stage; the rest is divided.
_REPLICATED = {
    0: (True, True, True),
    1: (True, True, False),
    2: (True, False, False),
    3: (False, False, False),
}
_FP32_PARAMETERS = ("ddp", "ddp_compress")
_NOT_SHARDED = ("single", "ddp", "ddp_compress", "ddp_master")
# Bytes a parameter of what the reference needs: to train on its device (parameters and gradients in low precision,
# fp32 sums of gradients, masters and moments), and fp32 copies on the host (first and last parameters, gradients,
# moments, updates, a file).
_REFERENCE_DEVICE_BYTES = 20
_REFERENCE_HOST_BYTES = 24
_FILLED = 0.9  # of a GPU, at most, before activations


def least_rank_bytes(configuration: Configuration) -> int:
    """Bytes of parameters, gradients and optimizer state that one rank cannot do without."""
    settings = configuration.settings
    count = models.parameter_count(models.ModelConfig.model_validate(configuration.model))
    low = settings.precision != "fp32" and configuration.strategy not in _FP32_PARAMETERS
    parts = (2, 2, 12) if low else (4, 4, 8)
    if configuration.strategy == "compute_only":
        return count * (parts[0] + parts[1])
    unknown = 0 if configuration.strategy in _NOT_SHARDED else 3
    replicated = _REPLICATED[unknown if configuration.stage is None else configuration.stage]
    return sum(
        count * part // (1 if whole else settings.world_size)
        for part, whole in zip(parts, replicated, strict=True)
    )


def why_too_large(
    configuration: Configuration, *, rank_memory_bytes: int | None, gpus: Sequence[Gpu] = ()
) -> str | None:
    """One sentence when the configuration cannot fit on this host or on one of ``gpus``, else None."""
    rank_bytes, ranks = least_rank_bytes(configuration), configuration.settings.world_size
    what = "parameters, gradients and optimizer state"
    if configuration.settings.device == "cuda":
        return _why_too_large_for_gpu(rank_bytes, gpus, what)
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


def _why_too_large_for_gpu(rank_bytes: int, gpus: Sequence[Gpu], what: str) -> str | None:
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes, default=None)
    if smallest is None or rank_bytes <= smallest.total_bytes:
        return None
    return (
        f"{what} alone need {rank_bytes / GIB:.2f} GiB on each rank and GPU {smallest.index} has "
        f"{smallest.total_bytes / GIB:.2f}: not started"
    )


def verification_model(
    model: Mapping[str, Any],
    *,
    rank_memory_bytes: int | None,
    gpus: Sequence[Gpu] = (),
    layers: int | None = None,
) -> dict[str, Any]:
    """The model itself, or the same with fewer layers where the reference would not fit or ``layers`` asks for it.
    Dropout is off, since every strategy draws other masks."""
    config = models.ModelConfig.model_validate(dict(model)).model_copy(update={"dropout": 0.0})
    config = with_layers(config, min(layers or config.num_layers, config.num_layers))
    available = memory_available_bytes()
    host_bytes = available if rank_memory_bytes is None else min(available, rank_memory_bytes)
    device_bytes = min((gpu.total_bytes for gpu in gpus), default=None)

    def fits(config: models.ModelConfig) -> bool:
        count = models.parameter_count(config)
        if device_bytes is None:  # the device's memory is the host's
            return count * (_REFERENCE_DEVICE_BYTES + _REFERENCE_HOST_BYTES) <= host_bytes
        on_device = count * _REFERENCE_DEVICE_BYTES <= _FILLED * device_bytes
        return on_device and count * _REFERENCE_HOST_BYTES <= host_bytes

    while config.num_layers > 1 and not fits(config):
        config = with_layers(config, config.num_layers // 2)
    return config.model_dump()


def with_layers(config: models.ModelConfig, layers: int) -> models.ModelConfig:
    """The same model with ``layers`` layers; loaded weights are for all of them, so fewer begin at random."""
    if layers == config.num_layers:
        return config
    update: dict[str, Any] = {"num_layers": layers}
    if isinstance(config, models.HFConfig):
        update["weights"] = RANDOM_WEIGHTS
    return config.model_copy(update=update)
