"""What a comparison runs where the command line does not say: by the device that it runs on. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from zerobench.errors import ConfigError
from zerobench.host.gpus import VisibleGpus
from zerobench.strategies.catalogue import default_strategies

DEVICES = ("auto", "cpu", "cuda")


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
    rows = default_strategies(device)
    packages = dict.fromkeys(row.package for row in rows if row.package is not None)
    missing = {package for package in packages if not installed(package)}
    chosen = tuple(row.name for row in rows if row.package not in missing)
    if device == "cpu":
        # Data-parallel training begins at two ranks, unless one core would have to carry both.
        return Defaults(
            model="tiny",
            precision="fp32",
            strategies=chosen,
            world_size=min(2, cpu_num),
            batch_size=4,
            seq_length=128,
            warmup_steps=5,
        )
    return Defaults(
        model="gpt2",
        precision="bf16",
        strategies=chosen,
        world_size=gpu_num,
        batch_size=8,
        seq_length=1024,
        # Peers' allocators settle and GPUs come to their power cap meanwhile (benchmarks/gpu_h200x4.md).
        warmup_steps=20,
    )
