"""Warnings about the disks that a plan's rows swap to. Imports torch only to probe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench.bench.mfu import likely_compute_s
from zerobench.bench.swap.plan import Swap, may_swap, swap_of
from zerobench.errors import Error
from zerobench.host.disks import Disks, too_little_locked
from zerobench.host.io_settings import default_file, io_choice, slow_path_warning
from zerobench.strategies.base import NVME_OFFLOADS
from zerobench.strategies.catalogue import OURS

if TYPE_CHECKING:
    from zerobench.bench.plan.configuration import Configuration


def disk_warnings(
    configurations: Sequence[Configuration],
    *,
    disks: Disks,
    host_ranks: int | None = None,
    gpu_name: str | None = None,
) -> list[str]:
    """Warn of folders on one disk, and of disks whose transfers are likely to be the limit: as `tune io` found them,
    else probed now. ``gpu_name``: of each rank's."""
    warnings = []
    swapping = list(filter(may_swap, configurations))
    for paths in dict.fromkeys(tuple(c.settings.nvme_paths) for c in swapping):
        rows = [c for c in swapping if tuple(c.settings.nvme_paths) == paths]
        swaps = [swap_of(row, host_ranks=host_ranks, settings_file=disks.settings_file) for row in rows]
        is_moving = any(found is None or found.written_bytes for found in swaps)
        for group in disks.groups(paths):
            names = " and ".join(group)
            if len(group) > 1:
                warnings.append(
                    f"{names} are on one disk, so spreading transfers over them gains nothing: give one"
                )
            if not is_moving:
                continue
            try:
                own = rows[0].options.get("offload_optimizer")
                rates = disks.rates(group, io_choice(group, own, settings_file=disks.settings_file))
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


def tuned_notes(configurations: Sequence[Configuration], *, settings_file: Path | None = None) -> list[str]:
    """Tell which rows swap as `tune io` found best: with what, and which file has that."""
    swapping = [c for c in configurations if c.settings.offload in NVME_OFFLOADS and c.strategy in OURS]
    used = [
        (
            c.settings.nvme_paths[0],
            io_choice(c.settings.nvme_paths, c.options.get("offload_optimizer"), settings_file=settings_file),
        )
        for c in swapping
    ]
    return list(
        dict.fromkeys(
            f"{path}: state is swapped with {io.text} (settings of {settings_file or default_file()})"
            for path, io in used
            if io.is_tuned
        )
    )


def why_not_lockable(
    configuration: Configuration,
    *,
    lockable_bytes: float,
    host_ranks: int | None = None,
    settings_file: Path | None = None,
) -> str | None:
    """Return one sentence where io_uring would have to lock more memory, of all ranks of a user, than
    ``lockable_bytes``, which the limit leaves."""
    settings, own = configuration.settings, configuration.options.get("offload_optimizer") or {}
    if configuration.strategy not in OURS or settings.offload not in NVME_OFFLOADS:
        return None
    swap = swap_of(configuration, host_ranks=host_ranks, settings_file=settings_file)
    io = io_choice(settings.nvme_paths, own, settings_file=settings_file)
    if io.engine != "io_uring" or own.get("io_allow_fallback") or swap is None:
        return None
    if swap.locked_bytes <= lockable_bytes:
        return None
    return f"{too_little_locked(swap.locked_bytes, lockable_bytes)}, or add --io-engine threads: not started"
