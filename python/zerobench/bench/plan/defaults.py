"""Defaults of a comparison, by the device that it runs on. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerobench.bench.plan.options import default_of
from zerobench.errors import ConfigError
from zerobench.host.gpus import VisibleGpus
from zerobench.host.packages import is_installed
from zerobench.results.settings import OPTIONS
from zerobench.strategies.catalogue import default_strategies

DEVICES = ("auto", "cpu", "cuda")


def choose_device(asked: str, seen: VisibleGpus) -> str:
    """ "cpu" or "cuda"; raises ConfigError where GPUs were asked for and there are none."""
    if asked not in DEVICES:
        raise ConfigError(f"unknown --device {asked!r}: use one of {', '.join(DEVICES)}")
    if asked == "cuda" and not seen.gpus:
        raise ConfigError(f"--device cuda: {seen.reason}; remove --device cuda to compare on CPU ranks")
    return "cuda" if asked != "cpu" and seen.gpus else "cpu"


def defaults_on(
    device: str, *, gpu_num: int, cpu_num: int, installed: Callable[[str], bool] = is_installed
) -> dict[str, Any]:
    """Return the value of every option that is not given: a model that the device is busy with for a fraction of a
    second a step."""
    rows = default_strategies(device)
    packages = dict.fromkeys(row.package for row in rows if row.package is not None)
    missing = {package for package in packages if not installed(package)}
    # Data-parallel training begins at two ranks, unless one core would have to carry both.
    ranks = min(2, cpu_num) if device == "cpu" else gpu_num
    return {
        **{key: default_of(key, device) for key in OPTIONS},
        "strategies": tuple(row.name for row in rows if row.package not in missing),
        "world_size": (ranks,),
    }
