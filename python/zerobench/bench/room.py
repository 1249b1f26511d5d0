"""Which rows fit into device and host memory and onto disks together. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from zerobench.results.schema import Row
from zerobench.results.sizes import MIB

HOST_SHARE = 0.9  # of what is available
DEVICE_SHARE = 0.95  # of a GPU
DISK_SHARE = 0.9  # of what is free
_CONTEXT_BYTES = 600 * MIB  # of CUDA and its libraries, of one process
_PROCESS_BYTES = 1024 * MIB  # of a rank whose peak the kernel did not tell


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that is there for all rows together."""

    device_bytes: int | None  # of the smallest GPU; None on CPU ranks
    host_bytes: int

    def holds(self, rows: Sequence[Row]) -> bool:
        """Return whether the rows fit together, by what each of them used alone."""
        on_host = sum(map(host_need_bytes, rows)) <= HOST_SHARE * self.host_bytes
        # Every row begins with the first GPU.
        on_device = (
            self.device_bytes is None or sum(map(device_need_bytes, rows)) <= DEVICE_SHARE * self.device_bytes
        )
        return on_host and on_device and _fits_on_disks(rows)

    def seats(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that fit together, as many as possible, in their order."""
        chosen: list[Row] = []
        needs = host_need_bytes if self.device_bytes is None else device_need_bytes
        for row in sorted(rows, key=needs):
            if self.holds([*chosen, row]):
                chosen.append(row)
        return [row for row in rows if any(row is one for one in chosen)]


def device_need_bytes(row: Row) -> int:
    """Return what a row took of each of its devices, caches of torch's allocator and the context included."""
    taken = (row.torch_reserved_peak_bytes or row.peak_device_bytes or 0) + (row.outside_torch_bytes or 0)
    return max(taken + _CONTEXT_BYTES, row.device_used_peak_bytes or 0)


def host_need_bytes(row: Row) -> int:
    """Return what all ranks of a row took of the host; pages that they share count for each."""
    rank_bytes = row.peak_host_bytes
    if rank_bytes is None:
        on_cpu = row.settings.device == "cpu"
        held = (
            (row.peak_device_bytes or 0) if on_cpu else sum((row.memory_bytes or {}).get("host", {}).values())
        )
        rank_bytes = held + _PROCESS_BYTES
    return row.settings.world_size * rank_bytes


def _fits_on_disks(rows: Sequence[Row]) -> bool:
    """Return whether each folder has space for the files of all rows, as if they had no other folder: folders may
    share a disk."""
    needs: dict[str, int] = {}
    for row in rows:
        files = row.settings.world_size * sum((row.memory_bytes or {}).get("nvme", {}).values())
        for path in row.settings.nvme_paths if files else ():
            needs[path] = needs.get(path, 0) + files
    return all(need <= DISK_SHARE * shutil.disk_usage(path).free for path, need in needs.items())
