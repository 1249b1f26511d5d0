"""What the disks that state is swapped to give, and what that means for a step. Imports torch only to probe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench.bench.mfu import likely_compute_s
from zerobench.bench.swap.plan import Swap, may_swap, swap_of
from zerobench.errors import Error
from zerobench.host.io_settings import (
    IoChoice,
    Rates,
    default_file,
    io_choice,
    settings_for,
    slow_path_warning,
)
from zerobench.host.storage import free_bytes, lockable_bytes
from zerobench.results.sizes import MIB
from zerobench.strategies.base import NVME_OFFLOADS
from zerobench.strategies.catalogue import OURS

if TYPE_CHECKING:
    from zerobench.bench.plan.plan import Configuration

_PROBE_BYTES = 256 << 20  # of a file, at most
_FIRST_BYTES = 16 << 20


def probe(paths: Sequence[str], io: IoChoice, *, seconds: float = 1.0, rank_num: int = 1) -> Rates:
    """Of files on all of these folders together, striped as the engine does it, in about so many seconds; ``rank_num``
    processes do so at the same time. Error where there is no room."""
    paths = list(dict.fromkeys(paths))
    num = min(_PROBE_BYTES, room_bytes(paths, rank_num=rank_num)) // io.block_bytes
    if num < 1:
        raise Error(
            f"{' and '.join(paths)} have no room for a file of {io.block_bytes / MIB:g} MiB a rank to measure with"
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
    swapping = list(filter(may_swap, configurations))
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
                rates = settings_for(Path(group[0])) or probe(
                    group, io_choice(group, rows[0].options.get("offload_optimizer"))
                )
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
    used = [
        (c.settings.nvme_paths[0], io_choice(c.settings.nvme_paths, c.options.get("offload_optimizer")))
        for c in swapping
    ]
    return list(
        dict.fromkeys(
            f"{path}: state is swapped with {io.text} (settings of {default_file()})"
            for path, io in used
            if io.is_tuned
        )
    )


def why_not_lockable(configuration: Configuration, *, host_ranks: int | None = None) -> str | None:
    """One sentence where io_uring would have to lock more memory, of all ranks of a user, than the limit leaves."""
    settings, own = configuration.settings, configuration.options.get("offload_optimizer") or {}
    if configuration.strategy not in OURS or settings.offload not in NVME_OFFLOADS:
        return None
    swap = swap_of(configuration, host_ranks=host_ranks)
    io = io_choice(settings.nvme_paths, own)
    if io.engine != "io_uring" or own.get("io_allow_fallback") or swap is None:
        return None
    lockable = lockable_bytes()
    if swap.locked_bytes <= lockable:
        return None
    return f"{too_little_locked(swap.locked_bytes, lockable)}, or add --io-engine threads: not started"


def too_little_locked(needed_bytes: float, lockable: float) -> str:
    return (
        f"io_uring locks about {needed_bytes / MIB:.0f} MiB of buffers and RLIMIT_MEMLOCK leaves "
        f"{lockable / MIB:.0f}, {(needed_bytes - lockable) / MIB:.0f} too few: raise it (ulimit -l, LimitMEMLOCK=, "
        "docker run --ulimit memlock=-1)"
    )


def ring_refusal(locked_bytes: int) -> str | None:
    """Why io_uring is not usable here with so many bytes of buffers; None where it is."""
    from zerobench import _native

    refusal: str | None = _native.load().io_uring_refusal()
    if refusal is None and locked_bytes > (lockable := lockable_bytes()):
        return too_little_locked(locked_bytes, lockable)
    return refusal
