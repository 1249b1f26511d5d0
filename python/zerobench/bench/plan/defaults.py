"""What a comparison runs where the command line does not say: by the device that it runs on. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

from zerobench import strategies
from zerobench.bench.plan.options import default_of
from zerobench.errors import ConfigError
from zerobench.host.gpus import VisibleGpus
from zerobench.results.settings import OPTIONS

DEVICES = ("auto", "cpu", "cuda")
_ON_CPU = ("single", "zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2")
# The floor comes first, and DDP three times: as most of its users have it, with gradients reduced in low precision, and
# with the dtypes of the other rows.
_ON_GPUS = (
    "compute_only", "zero0", "zero1", "zero2", "zero3",
    "ddp", "ddp_compress", "ddp_master", "fsdp1", "fsdp2", "fsdp2_keep",
)  # fmt: skip
_FURTHER_PEERS = {"deepspeed": "deepspeed", "mfsdp": "megatron_fsdp"}  # by the package that they need


def choose_device(asked: str, seen: VisibleGpus) -> str:
    """ "cpu" or "cuda"; raises ConfigError where GPUs were asked for and there are none."""
    if asked not in DEVICES:
        raise ConfigError(f"unknown --device {asked!r}: use one of {', '.join(DEVICES)}")
    if asked == "cuda" and not seen.gpus:
        raise ConfigError(f"--device cuda: {seen.reason}: leave it out to compare on CPU ranks")
    return "cuda" if asked != "cpu" and seen.gpus else "cpu"


def is_installed(package: str) -> bool:
    """Without importing it: importing DeepSpeed initialises CUDA."""
    return importlib.util.find_spec(package) is not None


def defaults_on(
    device: str, *, gpu_num: int, cpu_num: int, installed: Callable[[str], bool] = is_installed
) -> dict[str, Any]:
    """Return the value of every option that is not given: a model that the device is busy with for a fraction of a
    second a step."""
    found = {key: default_of(key, device) for key in OPTIONS}
    if device == "cpu":
        # Data-parallel training begins at two ranks, unless one core would have to carry both.
        return {**found, "strategies": _ON_CPU, "world_size": (min(2, cpu_num),)}
    return {**found, "strategies": (*_ON_GPUS, *_installed_peers(installed)), "world_size": (gpu_num,)}


def _installed_peers(installed: Callable[[str], bool]) -> list[str]:
    """One row a ZeRO stage of each further package, where it can be imported, and DeepSpeed's faster stage 3."""
    return [
        name
        for prefix, package in _FURTHER_PEERS.items()
        if installed(package)
        for name in strategies.available()
        if re.fullmatch(rf"{prefix}\d(_leaves)?", name)
    ]
