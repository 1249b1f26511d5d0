"""Model FLOP/s utilisation: what a row computes a second over what its GPUs could at most; and what it is likely to
compute. Imports no torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from zerobench import models
from zerobench.results.schema import Mfu, Row, Settings

_COLUMNS = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}
_LIKELY_SHARE = 0.5  # of the peak


@cache
def _peaks() -> dict[str, dict[str, float | None]]:
    """Return peaks in TFLOP/s by device name and dtype."""
    devices = json.loads(Path(__file__).with_name("gpu_peaks.json").read_text(encoding="utf-8"))["devices"]
    return {
        name: {column: device[column] for column in _COLUMNS.values()}
        for device in devices
        for name in device["names"]
    }


def peak_tflops(device_name: str, compute_dtype: str) -> float | None:
    """Dense peak of one GPU in the dtype that matrix products run in; None for a GPU or dtype that is not known."""
    return _peaks().get(device_name, {}).get(_COLUMNS.get(compute_dtype, ""))


def likely_compute_s(settings: Settings, device_name: str) -> float | None:
    """Forward and backward of a step at half of the GPU's peak; None where that or the model's FLOPs are unknown."""
    peak = _peaks().get(device_name, {}).get("tf32" if settings.tf32 else settings.precision)
    if peak is None:
        return None
    config = models.from_dict(settings.model_config_resolved)
    tokens = settings.batch_size * settings.seq_length * settings.grad_accum
    flops = models.flops_per_token(config, settings.seq_length)
    if flops is None:
        return None
    passes = 4 / 3 if settings.checkpointing else 1.0  # backward costs two forwards, and recomputes one
    return passes * tokens * flops / (_LIKELY_SHARE * peak * 1e12)


def utilisation(row: Row, device_name: str) -> Mfu | None:
    """Return the utilisation of a measured row, or None where its GPU's peak or its model's FLOPs are unknown."""
    if row.tokens_per_s is None or row.dtypes is None:
        return None
    peak = peak_tflops(device_name, row.dtypes.compute)
    if peak is None:
        return None
    config = models.from_dict(row.settings.model_config_resolved)
    flops = models.flops_per_token(config, row.settings.seq_length)
    if flops is None:
        return None
    achieved = flops * row.tokens_per_s / row.settings.world_size / 1e12
    return Mfu(
        pct=100.0 * achieved / peak,
        tflops_per_gpu=achieved,
        peak_tflops=peak,
        peak_of=f"{device_name}, {_COLUMNS[row.dtypes.compute]} dense",
        flops_per_token=flops,
    )
