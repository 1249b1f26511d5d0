"""What the disks that state is swapped to give, and what that means for a step. Imports torch only to probe."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench import models
from zerobench.bench.fit import GIB, with_layers
from zerobench.bench.mfu import likely_compute_s
from zerobench.bench.names import OURS
from zerobench.bench.storage import free_bytes, lockable_bytes
from zerobench.config import OffloadOptimizerConfig
from zerobench.errors import ConfigError, Error
from zerobench.io_settings import IoChoice, Rates, default_file, io_choice, settings_for, slow_path_warning
from zerobench.strategies.base import NVME_OFFLOADS

if TYPE_CHECKING:
    from zerobench.bench.plan import Configuration

_STATE_BYTES = 12  # of a parameter: fp32 master and two moments
_PROBE_BYTES = 256 << 20  # of a file, at most
_FIRST_BYTES = 16 << 20
_MIB = 1 << 20


def io_of(paths: Sequence[str], options: Mapping[str, Any]) -> IoChoice:
    """How a row swaps; ``options`` are its own beside its settings."""
    own = options.get("offload_optimizer") or {}
    return io_choice(
        Path(paths[0]),
        engine=own.get("io_engine"),
        block_bytes=own.get("io_block_bytes"),
        depth=own.get("io_depth"),
    )


def probe(paths: Sequence[str], io: IoChoice, *, seconds: float = 1.0, rank_num: int = 1) -> Rates:
    """Of files on all of these folders together, striped as the engine does it, in about so many seconds; ``rank_num``
    processes do so at the same time. Error where there is no room."""
    paths = list(dict.fromkeys(paths))
    num = min(_PROBE_BYTES, room_bytes(paths, rank_num=rank_num)) // io.block_bytes
    if num < 1:
        raise Error(
            f"{' and '.join(paths)} have no room for a file of {io.block_bytes / _MIB:g} MiB a rank to measure with"
        )
    return _rates(paths, io, most_num=num, seconds=seconds)


def room_bytes(paths: Sequence[str], *, rank_num: int) -> int:
    """For a file of each rank on each folder, in half of what is free."""
    return min(
        free_bytes(Path(path)) // (2 * rank_num * len(group)) for group in by_disk(paths) for path in group
    )


def by_disk(paths: Sequence[str]) -> list[list[str]]:
    """Folders in groups of one file system."""
    groups: dict[int, list[str]] = {}
    for path in dict.fromkeys(paths):
        groups.setdefault(os.stat(path).st_dev, []).append(path)
    return list(groups.values())


def _rates(paths: Sequence[str], io: IoChoice, *, most_num: int, seconds: float) -> Rates:
    """Of the largest pieces that the time allows, beginning small: a slow path must not hold up a start."""
    from zerobench import _native

    stripe_bytes = io.block_bytes * len(paths)
    first_num = min(most_num, max(1, _FIRST_BYTES // stripe_bytes))
    bench: Any = None

    def rate(mode: str, most_num: int) -> tuple[float, int]:
        nonlocal bench
        num, spent_s = first_num, 0.0
        while True:
            if mode == "write":  # files of that size, so that all that is read later was written
                bench = None
                bench = _native.load().IoBench(directories=paths, chunk_bytes=stripe_bytes, chunk_num=num)
            time_s, moved_bytes = bench.run_raw(
                io.engine, mode=mode, block_bytes=io.block_bytes, depth=io.depth, chunk_num=num
            )
            spent_s += time_s
            fitting = min(most_num, int((seconds / 3 - spent_s) / time_s * num))
            if fitting <= num:
                return moved_bytes / time_s, num
            num = fitting

    write, written_num = rate("write", most_num)
    return Rates(
        write_bytes_per_s=write,
        read_bytes_per_s=rate("read", written_num)[0],
        both_bytes_per_s=rate("both", written_num)[0],
    )


def disk_warnings(
    configurations: Sequence[Configuration], *, host_ranks: int | None = None, gpu_name: str | None = None
) -> list[str]:
    """Of folders on one disk, and of disks whose transfers are likely to be the limit: as `tune io` found them, else
    probed now. ``gpu_name``: of each rank's."""
    warnings = []
    swapping = [c for c in configurations if c.settings.offload in NVME_OFFLOADS]
    for paths in dict.fromkeys(tuple(c.settings.nvme_paths) for c in swapping):
        rows = [c for c in swapping if tuple(c.settings.nvme_paths) == paths]
        swaps = [swap_of(row, host_ranks=host_ranks) for row in rows]
        is_moving = any(found is None or found.written_bytes for found in swaps)
        for group in by_disk(paths):
            names = " and ".join(group)
            if len(group) > 1:
                warnings.append(
                    f"{names} are on one disk, so spreading transfers over them gains nothing: give one"
                )
            if not is_moving:
                continue
            try:
                rates = settings_for(Path(group[0])) or probe(group, io_of(group, rows[0].options))
            except (OSError, Error):
                continue  # rows will say it
            share = len(group) / len(set(paths))
            most, row = max(
                ((found or Swap(), row) for found, row in zip(swaps, rows, strict=True)),
                key=lambda swapping: swapping[0].read_bytes,
            )
            warning = slow_path_warning(
                names,
                rates,
                read_bytes=most.read_bytes * share,
                written_bytes=most.written_bytes * share,
                compute_s=likely_compute_s(row.settings, gpu_name) if gpu_name else None,
            )
            warnings += [warning] if warning else []
    return warnings


def tuned_notes(configurations: Sequence[Configuration]) -> list[str]:
    """Of rows that swap as `tune io` found best: with what, and which file has that."""
    swapping = [c for c in configurations if c.settings.offload in NVME_OFFLOADS and c.strategy in OURS]
    used = [(c.settings.nvme_paths[0], io_of(c.settings.nvme_paths, c.options)) for c in swapping]
    return list(
        dict.fromkeys(
            f"{path}: state is swapped with {io.text} (settings of {default_file()})"
            for path, io in used
            if io.is_tuned
        )
    )


def check_locked_memory(configurations: Sequence[Configuration], *, host_ranks: int | None = None) -> None:
    """ConfigError where io_uring would have to lock more memory, of all ranks of a user, than the limit leaves."""
    lockable = lockable_bytes()
    for configuration in configurations:
        settings, own = configuration.settings, configuration.options.get("offload_optimizer") or {}
        if configuration.strategy not in OURS or settings.offload not in NVME_OFFLOADS:
            continue
        io, swap = (
            io_of(settings.nvme_paths, configuration.options),
            swap_of(configuration, host_ranks=host_ranks),
        )
        if io.engine != "io_uring" or own.get("io_allow_fallback") or swap is None:
            continue
        if swap.ring_bytes > lockable:
            raise ConfigError(
                f"{configuration.name}: {too_little_locked(swap.ring_bytes, lockable)}, or add --io-engine threads"
            )


def too_little_locked(needed_bytes: float, lockable: float) -> str:
    return (
        f"io_uring locks about {needed_bytes / _MIB:.0f} MiB of buffers and RLIMIT_MEMLOCK leaves "
        f"{lockable / _MIB:.0f}, {(needed_bytes - lockable) / _MIB:.0f} too few: raise it (ulimit -l, LimitMEMLOCK=, "
        "docker run --ulimit memlock=-1)"
    )


def ring_refusal(locked_bytes: int) -> str | None:
    """Why io_uring is not usable here with so many bytes of buffers; None where it is."""
    from zerobench import _native

    refusal: str | None = _native.load().io_uring_refusal()
    if refusal is None and locked_bytes > (lockable := lockable_bytes()):
        return too_little_locked(locked_bytes, lockable)
    return refusal


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Of all ranks of a host, about: what a step reads and writes, and the memory that I/O moves it through."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0
    ring_bytes: float = 0.0


def swap_of(configuration: Configuration, *, host_ranks: int | None = None) -> Swap | None:
    """``host_ranks``: of this host, where others have some too. None where the row itself finds out (ratio auto)."""
    settings, own = configuration.settings, configuration.options.get("offload_optimizer") or {}
    ranks = min(settings.world_size, host_ranks or settings.world_size)
    if settings.offload_ratio == "auto":
        return None
    element_bytes = 4 if settings.precision == "fp32" else 2
    if configuration.strategy not in OURS:
        numel = (settings.parameter_count or 0) * ranks / settings.world_size
        parameters_bytes = element_bytes * numel if settings.offload == "nvme_full" else 0.0
        return Swap(
            read_bytes=_STATE_BYTES * numel + 2 * parameters_bytes,
            written_bytes=_STATE_BYTES * numel + parameters_bytes,
        )
    share = 1.0 if settings.offload_ratio is None else float(settings.offload_ratio)
    shards = [share * numel / settings.world_size for numel in unit_numels(configuration)]
    if not share:
        return Swap()
    # As csrc/stores/host_store_memory.cpp spends memory: buffers, gradients, parameters, and then state.
    chunk_numel = own.get("chunk_numel") or OffloadOptimizerConfig.model_fields["chunk_numel"].default
    slot_bytes = _STATE_BYTES * min(max(shards), chunk_numel)
    io = io_of(settings.nvme_paths, configuration.options)
    frame_num = 2 * math.ceil(io.depth * io.block_bytes / slot_bytes) + 2
    budget_bytes = own.get("host_memory_bytes") or (settings.host_memory_gib or 0) * GIB / ranks
    left_bytes = max(0.0, budget_bytes - (frame_num + 1) * slot_bytes - element_bytes * sum(shards))
    parameters_bytes = element_bytes * sum(shards) if settings.offload == "nvme_full" else 0.0
    swapped_parameters = max(0.0, parameters_bytes - left_bytes)
    resident_num = (left_bytes - (parameters_bytes - swapped_parameters)) // slot_bytes
    chunk_num = sum(math.ceil(numel / chunk_numel) for numel in shards)
    fits = chunk_num <= resident_num + frame_num
    state = 0.0 if fits else _STATE_BYTES * sum(shards) * (1 - resident_num / chunk_num)
    ring_bytes = slot_bytes * (chunk_num if fits else resident_num + frame_num)
    if settings.offload == "nvme_full":
        ring_bytes += parameters_bytes - swapped_parameters + element_bytes * max(shards)
    return Swap(
        read_bytes=ranks * (state + 2 * swapped_parameters),
        written_bytes=ranks * (state + swapped_parameters),
        ring_bytes=ranks * ring_bytes,
    )


def unit_numels(configuration: Configuration) -> list[int]:
    """Of the root and each block, about."""
    config = models.ModelConfig.model_validate(configuration.model)
    count, layers = models.parameter_count(config), config.num_layers
    block = models.parameter_count(with_layers(config, layers + 1)) - count
    return [max(count - layers * block, 1), *[block] * layers]
