"""Options of a comparison as the command line gives them, checked before any work. Imports no torch."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerobench import strategies
from zerobench.bench.protocol.tolerances import TOLERANCES
from zerobench.data import ID_WIDTHS
from zerobench.engine.config import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from zerobench.errors import ConfigError
from zerobench.host import imports
from zerobench.host.gpus import Gpu
from zerobench.host.io_settings import ENGINES
from zerobench.results.setting_values import comma_list, run_num, split
from zerobench.results.settings import OPTIONS, Option, Takes, flag_of
from zerobench.strategies import catalogue
from zerobench.strategies.base import COMPILE_MODES, NVME_OFFLOADS
from zerobench.strategies.catalogue import OFFLOADS
from zerobench.strategies.pipelining import CHUNKS

BINDINGS = ("none", "numa")
NETWORK_WAYS = ("auto", "shaped", "paced")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
OWN_ATTENTION = "sdpa"  # of our presets
COMMUNICATORS = {"cpu": ("auto", "shm", "c10d"), "cuda": ("auto", "nccl", "peer")}
_MIN_SEED, _MAX_SEED = -(1 << 63), (1 << 64) - 1  # that torch takes


class CompareOptions:
    """Values of a comparison's options, under their names in the table (results/settings.py).
    Options that take lists have tuples. What is not given has the default of CPU ranks."""

    def __init__(
        self,
        *,
        gpus: Sequence[Gpu] = (),  # that torch sees, where the device is cuda
        # Of ranks that torchrun or srun started: those that share this machine's memory and disks, and of these the
        # ones that share rank 0's cores.
        host_ranks: int | None = None,
        core_ranks: int | None = None,
        given: frozenset[str] = frozenset(),  # "--precision" and others that were named, whatever their value
        **asked: Any,
    ) -> None:
        if unknown := asked.keys() - OPTIONS.keys():
            raise TypeError(f"no option is called {', '.join(sorted(unknown))}")
        self.gpus, self.given = gpus, given
        self.host_ranks, self.core_ranks = host_ranks, host_ranks if core_ranks is None else core_ranks
        self._asked = {key: asked[key] if key in asked else default_of(key, "cpu") for key in OPTIONS}

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self._asked:
            raise AttributeError(f"no option is called {key}")
        return self._asked[key]

    def values(self, key: str) -> list[Any]:
        """Return the values of an option in a list, also of one that has a single value; without None."""
        found = self._asked[key]
        found = list(found) if isinstance(found, list | tuple) else [found]
        return [value for value in found if value is not None]

    def with_strategy(self, strategy: str) -> CompareOptions:
        """Return these options with one strategy."""
        return CompareOptions(
            gpus=self.gpus,
            host_ranks=self.host_ranks,
            core_ranks=self.core_ranks,
            given=self.given,
            **{**self._asked, "strategies": (strategy,)},
        )


def default_of(key: str, device: str) -> Any:
    """Return the value of an option that is not given, on ``"cpu"`` or ``"cuda"``."""
    option = OPTIONS[key]
    on_device = option.on_gpus if device == "cuda" else option.on_cpu
    default = option.default if on_device is None else on_device
    if default == "":
        return ()
    return default if isinstance(default, int | float) else value_of(key, default)


def value_of(key: str, given: Any) -> Any:
    """Return an option's value from its text, or from its texts where it takes one after the other; None where it is
    not given. Raises ConfigError for a text that gives none."""
    option, flag = OPTIONS[key], flag_of(key)
    if option.takes is Takes.SWITCH:
        return bool(given)
    if option.convert is dict:
        return dict(given or {})
    if option.takes is Takes.REPEATED:
        return [path_of(flag, option, text) for text in given or ()]
    if option.takes.is_list:
        text = given if given is None or isinstance(given, str) else comma_list(given)
        return (None,) if text is None else tuple(split(flag, text, option.convert))
    if given is None:
        return None
    return path_of(flag, option, str(given)) if option.convert is Path else option.convert(str(given))


def path_of(flag: str, option: Option, text: str) -> Path:
    if not text:  # which Path takes for the working folder
        what = "file" if (option.metavar or "").startswith("FILE") else "folder"
        raise ConfigError(f"{flag} is empty: give it a {what}")
    return Path(text)


def check_options(options: CompareOptions, *, given_world_size: int | None) -> None:
    for key, option in OPTIONS.items():
        for wrong in (
            value for value in options.values(key) if option.above_zero and not 0 < value < math.inf
        ):
            raise ConfigError(f"{flag_of(key)} {wrong:g} is not valid: use a finite value above zero")
    if not MIN_TIMEOUT_S <= options.timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"--timeout {options.timeout_s:g} is not valid: use {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:.0f} seconds"
        )
    if not _MIN_SEED <= options.seed <= _MAX_SEED:
        raise ConfigError(f"--seed {options.seed} is not valid: use one from {_MIN_SEED} to {_MAX_SEED}")
    if options.warmup_steps < 0:
        raise ConfigError(f"--warmup-steps {options.warmup_steps} is not valid: use zero or more")
    run_num(str(options.repeats))
    if options.repeats == "auto" and not options.rounds:
        raise ConfigError("--repeats auto rests on rows that take turns: remove --rounds 0, or give a number")
    if options.rounds < 0:
        raise ConfigError(f"--rounds {options.rounds} is not valid: use zero or more")
    for name in options.strategies:
        catalogue.check(name)
        if imports.is_place(name):
            # A place of one's own is wrong more often than a name. Costs the import of torch.
            strategies.get(name)
    known: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "--precision": (options.precision, list(TOLERANCES)),
        "--compile": (options.compile, COMPILE_MODES),
        "--offload": (options.offload, OFFLOADS),
        "--pipeline-schedule": (options.pipeline_schedule, list(CHUNKS)),
        "--bind": ([options.bind], BINDINGS),
        "--network-how": ([options.network_how], NETWORK_WAYS),
        f"--communicator on {options.device}": (options.communicator, COMMUNICATORS[options.device]),
        "--io-engine": ([options.io_engine] if options.io_engine else [], ENGINES),
        "--tokens": ([options.tokens] if options.tokens else [], list(ID_WIDTHS)),
        "--attention": ([options.attention] if options.attention else [], ATTENTIONS),
    }
    for what, (asked, choices) in known.items():
        for choice in asked:
            if choice not in choices:
                raise ConfigError(f"unknown {what} {choice!r}: use one of {', '.join(choices)}")
    if options.resume is not None and options.output_dir is not None:
        raise ConfigError("--resume continues in the folder that it names: remove --output-dir")
    check_offload(options)
    check_device(options, given_world_size=given_world_size)
    if given_world_size is not None and list(options.world_size) != [given_world_size]:
        raise ConfigError(
            f"--world-size {','.join(map(str, options.world_size))} differs from the {given_world_size} ranks that "
            "torchrun or srun started: remove it"
        )


def check_device(options: CompareOptions, *, given_world_size: int | None) -> None:
    if options.device == "cpu":
        if options.tf32:
            raise ConfigError("--tf32 is a mode of GPUs: remove it for CPU ranks")
        return
    if options.tf32 and "fp32" not in options.precision:
        raise ConfigError("--tf32 changes fp32 matrix products only: add --precision fp32, or remove it")
    if options.rank_memory_gib is not None:
        raise ConfigError("--rank-memory-gib limits CPU ranks: remove it for GPUs")
    largest = max(options.world_size, default=1)
    if given_world_size is None and largest > len(options.gpus):
        raise ConfigError(
            f"--world-size {largest} needs a GPU for each rank and torch sees {len(options.gpus)}: use at most as many"
        )


def check_offload(options: CompareOptions) -> None:
    """Raise ConfigError if an option for offloaded rows has no such row or is out of range, or if a folder cannot take
    files."""
    for ratio in options.offload_ratio:
        if isinstance(ratio, float) and not 0 <= ratio <= 1:
            raise ConfigError(f"--offload-ratio {ratio:g} is not valid: use a share from 0 to 1, or auto")
    check_folders("--nvme-path", options.nvme_paths)
    if options.config:
        return  # they may offload: the plan knows
    if set(options.offload) == {"none"}:
        for option, given in (
            ("--offload-ratio", any(ratio is not None for ratio in options.offload_ratio)),
            ("--host-memory-gib", options.host_memory_gib is not None),
        ):
            if given:
                raise ConfigError(f"{option} configures offloaded state: add --offload, or remove it")
    on_nvme = not set(NVME_OFFLOADS).isdisjoint(options.offload)
    if on_nvme and not options.nvme_paths:
        raise ConfigError("--offload nvme needs a folder on the disk to use: add --nvme-path")
    if not on_nvme and options.nvme_paths:
        raise ConfigError("--nvme-path sets the folder of state on NVMe: add --offload nvme, or remove it")
    if not on_nvme and options.io_engine is not None:
        raise ConfigError("--io-engine configures state on NVMe: add --offload nvme, or remove it")


def check_folders(source: str, paths: Sequence[Path]) -> None:
    """``source``: what names them, in an error."""
    for path in paths:
        try:
            os.fspath(path.absolute()).encode()  # results name it
            with tempfile.TemporaryFile(dir=path):
                pass
        except UnicodeEncodeError:
            raise ConfigError(
                f"{source} {path} has a path that is not UTF-8 text: give another folder"
            ) from None
        except (OSError, ValueError) as error:  # a null byte in a file's text is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{source} {path} cannot take files ({reason}): give a folder to write to"
            ) from None
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"{source} {' '.join(map(str, paths))} names a folder twice: name each once")
