"""What a comparison runs where the command line does not say: by the device that it runs on. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass

from zerobench import strategies
from zerobench.errors import ConfigError
from zerobench.host.gpus import VisibleGpus

DEVICES = ("auto", "cpu", "cuda")
_ON_CPU = ("single", "zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2")
# The floor comes first, and DDP three times: as most of its users have it, with gradients reduced in low precision, and
# with the dtypes of the other rows.
_ON_GPUS = (
    "compute_only", "zero0", "zero1", "zero2", "zero3",
    "ddp", "ddp_compress", "ddp_master", "fsdp1", "fsdp2", "fsdp2_keep",
)  # fmt: skip
_FURTHER_PEERS = {"deepspeed": "deepspeed", "mfsdp": "megatron_fsdp"}  # by the package that they need


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Values of the options that were not given."""

    model: str
    precision: str
    strategies: tuple[str, ...]
    world_size: int
    batch_size: int
    seq_length: int
    warmup_steps: int


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
) -> Defaults:
    """A model that the device is busy with for a fraction of a second a step."""
    if device == "cpu":
        # Data-parallel training begins at two ranks, unless one core would have to carry both.
        return Defaults(
            model="tiny",
            precision="fp32",
            strategies=_ON_CPU,
            world_size=min(2, cpu_num),
            batch_size=4,
            seq_length=128,
            warmup_steps=5,
        )
    return Defaults(
        model="gpt2",
        precision="bf16",
        strategies=(*_ON_GPUS, *_installed_peers(installed)),
        world_size=gpu_num,
        batch_size=8,
        seq_length=1024,
        # Peers' allocators settle and GPUs come to their power cap meanwhile (benchmarks/gpu_h200x4.md).
        warmup_steps=20,
    )


def _installed_peers(installed: Callable[[str], bool]) -> list[str]:
    """One row a ZeRO stage of each further package, where it can be imported, and DeepSpeed's faster stage 3."""
    return [
        name
        for prefix, package in _FURTHER_PEERS.items()
        if installed(package)
        for name in strategies.available()
        if re.fullmatch(rf"{prefix}\d(_leaves)?", name)
    ]
