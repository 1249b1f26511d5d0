"""What the command line asks of a comparison, checked before any work. Imports no torch."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zerobench import strategies
from zerobench.bench.protocol.tolerances import TOLERANCES
from zerobench.engine.config import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from zerobench.errors import ConfigError
from zerobench.host.gpus import Gpu
from zerobench.host.io_settings import ENGINES
from zerobench.strategies import catalogue
from zerobench.strategies.base import COMPILE_MODES, NVME_OFFLOADS, OFFLOADS, OptimizerSettings

BINDINGS = ("none", "numa")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
OWN_ATTENTION = "sdpa"  # of our presets
COMMUNICATORS = {"cpu": ("auto", "shm", "c10d"), "cuda": ("auto", "nccl", "peer")}
_MIN_SEED, _MAX_SEED = -(1 << 63), (1 << 64) - 1  # that torch takes

Ratio = float | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What the command line asks for. Lists span the grid."""

    models: Sequence[str] = ("tiny",)
    num_layers: Sequence[int | None] = (None,)
    hidden_sizes: Sequence[int | None] = (None,)
    model_options: dict[str, Any] = field(default_factory=dict)  # further fields of ModelConfig
    strategies: Sequence[str] = ()
    device: str = "cpu"
    gpus: Sequence[Gpu] = ()  # that torch sees, where the device is cuda
    host_ranks: int | None = None  # of this host, where torchrun or srun started some on others, too
    world_sizes: Sequence[int] = (2,)
    batch_sizes: Sequence[int] = (4,)
    seq_lengths: Sequence[int] = (128,)
    grad_accums: Sequence[int] = (1,)
    precisions: Sequence[str] = ("fp32",)
    clips: Sequence[float | None] = (None,)
    checkpointing: bool = False
    compiles: Sequence[str] = ("none",)
    offloads: Sequence[str] = ("none",)
    offload_ratios: Sequence[Ratio | None] = (None,)
    optimizer_in_backward: Sequence[bool] = (False,)
    communicators: Sequence[str] = ("auto",)  # of our rows
    nvme_paths: Sequence[Path] = ()
    io_engine: str | None = None  # of our rows on NVMe; None: what was tuned, else io_uring
    host_memory_gib: float | None = None
    device_memory_gib: float | None = None
    bind: str = "none"
    attention: str | None = None  # None: what the model has
    dropout: float | None = None
    tf32: bool = False
    verify_layers: int | None = None
    num_steps: int = 20
    warmup_steps: int = 5
    repeats: int = 1
    data: str = "stdlib"
    seed: int = 0
    timeout_s: float = 300.0
    rank_memory_gib: float | None = None
    baseline: str | None = None
    config_files: Sequence[Path] = ()
    learning_rate: float = OptimizerSettings.lr
    given: frozenset[str] = frozenset()  # "--precision" and others that were named, whatever their value


def check_options(options: CompareOptions, *, given_world_size: int | None) -> None:
    positive = {
        "--batch-size": options.batch_sizes,
        "--seq-length": options.seq_lengths,
        "--grad-accum": options.grad_accums,
        "--world-size": options.world_sizes,
        "--num-steps": [options.num_steps],
        "--repeats": [options.repeats],
        "--timeout": [options.timeout_s],
        "--clip": [clip for clip in options.clips if clip is not None],
        "--lr": [options.learning_rate],
    }
    for option, value in (
        ("--rank-memory-gib", options.rank_memory_gib),
        ("--host-memory-gib", options.host_memory_gib),
        ("--device-memory-gib", options.device_memory_gib),
        ("--verify-layers", options.verify_layers),
    ):
        if value is not None:
            positive[option] = [value]
    for option, values in positive.items():
        for wrong in (value for value in values if not 0 < value < math.inf):
            raise ConfigError(f"{option} {wrong:g} is impossible: use a finite value above zero")
    if not MIN_TIMEOUT_S <= options.timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"--timeout {options.timeout_s:g} is impossible: use {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:.0f} seconds"
        )
    if not _MIN_SEED <= options.seed <= _MAX_SEED:
        raise ConfigError(f"--seed {options.seed} is impossible: use one from {_MIN_SEED} to {_MAX_SEED}")
    if options.warmup_steps < 0:
        raise ConfigError(f"--warmup-steps {options.warmup_steps} is impossible: use zero or more")
    for name in options.strategies:
        catalogue.check(name)
        if catalogue.is_place(name):
            # A place of one's own is wrong more often than a name. Costs the import of torch.
            strategies.get(name)
    known: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "--precision": (options.precisions, list(TOLERANCES)),
        "--compile": (options.compiles, COMPILE_MODES),
        "--offload": (options.offloads, OFFLOADS),
        "--bind": ([options.bind], BINDINGS),
        f"--communicator on {options.device}": (options.communicators, COMMUNICATORS[options.device]),
        "--io-engine": ([options.io_engine] if options.io_engine else [], ENGINES),
        "--attention": ([options.attention] if options.attention else [], ATTENTIONS),
    }
    for what, (asked, choices) in known.items():
        for choice in asked:
            if choice not in choices:
                raise ConfigError(f"unknown {what} {choice!r}: use one of {', '.join(choices)}")
    check_offload(options)
    check_device(options, given_world_size=given_world_size)
    if given_world_size is not None and list(options.world_sizes) != [given_world_size]:
        raise ConfigError(
            f"--world-size {','.join(map(str, options.world_sizes))} differs from the {given_world_size} ranks that "
            "torchrun or srun started: leave it out"
        )


def check_device(options: CompareOptions, *, given_world_size: int | None) -> None:
    if options.device == "cpu":
        if options.tf32:
            raise ConfigError("--tf32 is a mode of GPUs: leave it out on CPU ranks")
        return
    if options.tf32 and "fp32" not in options.precisions:
        raise ConfigError("--tf32 is about fp32 matrix products: add --precision fp32, or leave it out")
    if options.rank_memory_gib is not None:
        raise ConfigError("--rank-memory-gib limits CPU ranks: leave it out on GPUs")
    largest = max(options.world_sizes, default=1)
    if given_world_size is None and largest > len(options.gpus):
        raise ConfigError(
            f"--world-size {largest} needs a GPU for each rank and torch sees {len(options.gpus)}: use at most as many"
        )


def check_offload(options: CompareOptions) -> None:
    """What only offloaded rows read must find one, and folders must take files."""
    for ratio in options.offload_ratios:
        if isinstance(ratio, float) and not 0 <= ratio <= 1:
            raise ConfigError(f"--offload-ratio {ratio:g} is impossible: use a share from 0 to 1, or auto")
    check_folders("--nvme-path", options.nvme_paths)
    if options.config_files:
        return  # they may offload: the plan knows
    if set(options.offloads) == {"none"}:
        for option, given in (
            ("--offload-ratio", any(ratio is not None for ratio in options.offload_ratios)),
            ("--host-memory-gib", options.host_memory_gib is not None),
        ):
            if given:
                raise ConfigError(f"{option} is about offloaded state: add --offload, or leave it out")
    on_nvme = not set(NVME_OFFLOADS).isdisjoint(options.offloads)
    if on_nvme and not options.nvme_paths:
        raise ConfigError("--offload nvme needs a folder on the disk to use: add --nvme-path")
    if not on_nvme and options.nvme_paths:
        raise ConfigError("--nvme-path is where state on NVMe goes: add --offload nvme, or leave it out")
    if not on_nvme and options.io_engine is not None:
        raise ConfigError("--io-engine is about state on NVMe: add --offload nvme, or leave it out")


def check_folders(source: str, paths: Sequence[Path]) -> None:
    """``source``: what names them, in an error."""
    for path in paths:
        try:
            os.fspath(path.absolute()).encode()  # results name it
            with tempfile.TemporaryFile(dir=path):
                pass
        except UnicodeEncodeError:
            raise ConfigError(
                f"{source} {path} stands in a path that is no text in UTF-8: give another folder"
            ) from None
        except (OSError, ValueError) as error:  # a null byte in a file's text is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{source} {path} cannot take files ({reason}): give a folder to write to"
            ) from None
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"{source} {' '.join(map(str, paths))} names a folder twice: name each once")
