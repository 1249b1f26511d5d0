"""Rates of files that bypass the page cache, and the memory that io_uring may lock. Imports torch only to probe."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerobench.errors import Error
from zerobench.host.io_settings import IoChoice, Rates, settings_for
from zerobench.host.storage import disk_of as real_disk_of
from zerobench.host.storage import free_bytes as real_free_bytes

MIB = 1 << 20

_PROBE_BYTES = 256 << 20  # of a file, at most


_FIRST_BYTES = 16 << 20


def probe(
    paths: Sequence[str],
    io: IoChoice,
    *,
    seconds: float = 1.0,
    rank_num: int = 1,
    free_bytes: Callable[[Path], int] = real_free_bytes,
) -> Rates:
    """Measure the rates of files on all of these folders together, striped as the engine does it, in about ``seconds``.
    ``rank_num`` processes do so at the same time. Raise Error if there is no room."""
    paths = list(dict.fromkeys(paths))
    num = min(_PROBE_BYTES, room_bytes(paths, rank_num=rank_num, free_bytes=free_bytes)) // io.block_bytes
    if num < 1:
        raise Error(
            f"{' and '.join(paths)} have no room for a file of {io.block_bytes / MIB:g} MiB a rank to measure with"
        )
    return _rates(paths, io, most_num=num, seconds=seconds)


def room_bytes(paths: Sequence[str], *, rank_num: int, free_bytes: Callable[[Path], int]) -> int:
    """For a file of each rank on each folder, in half of what is free."""
    return min(
        free_bytes(Path(path)) // (2 * rank_num * len(group)) for group in by_disk(paths) for path in group
    )


def by_disk(paths: Sequence[str], *, disk_of: Callable[[Path], Hashable] = real_disk_of) -> list[list[str]]:
    """Return the folders in groups of one file system."""
    groups: dict[Hashable, list[str]] = {}
    for path in dict.fromkeys(paths):
        groups.setdefault(disk_of(Path(path)), []).append(path)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class Disks:
    """How disks are told apart and measured, and where the settings that `tune io` found for them are kept."""

    settings_file: Path | None = None  # None: the user's own
    disk_of: Callable[[Path], Hashable] = real_disk_of
    measure: Callable[[Sequence[str], IoChoice], Rates] = probe

    def groups(self, paths: Sequence[str]) -> list[list[str]]:
        """Return the folders in groups of one disk."""
        return by_disk(paths, disk_of=self.disk_of)

    def rates(self, paths: Sequence[str], io: IoChoice) -> Rates:
        """Return what `tune io` found on the first of these folders, else what a probe of all of them finds now."""
        tuned = settings_for(Path(paths[0]), file=self.settings_file, disk_of=self.disk_of)
        return tuned or self.measure(paths, io)


def _rates(paths: Sequence[str], io: IoChoice, *, most_num: int, seconds: float) -> Rates:
    """Measure the rates of the largest pieces that the time allows, beginning small: a slow path must not hold up a
    start."""
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


def too_little_locked(needed_bytes: float, lockable: float) -> str:
    return (
        f"io_uring locks about {needed_bytes / MIB:.0f} MiB of buffers and RLIMIT_MEMLOCK leaves "
        f"{lockable / MIB:.0f}, {(needed_bytes - lockable) / MIB:.0f} too few: raise it (ulimit -l, LimitMEMLOCK=, "
        "docker run --ulimit memlock=-1)"
    )


def ring_refusal(locked_bytes: int, *, lockable: float) -> str | None:
    """Return why io_uring is not usable here with so many bytes of buffers, of which ``lockable`` may be locked; None
    where it is."""
    from zerobench import _native

    refusal: str | None = _native.load().io_uring_refusal()
    if refusal is None and locked_bytes > lockable:
        return too_little_locked(locked_bytes, lockable)
    return refusal
