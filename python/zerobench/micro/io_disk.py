"""The files that `bench io` and `tune io` measure, and timed passes over them.

torch is imported with the core, when a disk is made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from zerobench.errors import ConfigError, Error
from zerobench.host.disks import by_disk, probe, ring_refusal
from zerobench.host.io_settings import IoChoice
from zerobench.host.machine import memory_available_bytes
from zerobench.host.storage import free_bytes
from zerobench.micro.output import size_text
from zerobench.results.sizes import GIB, MIB

DEFAULT_BYTES = 8 * GIB  # of all files together, where a quarter of the free space allows
FILL_S = 10.0  # files are no larger than what is written in this time
_FILL_BYTES = 256 * MIB  # at a time


@dataclass(frozen=True, kw_only=True)
class IoSetting:
    """One way to swap."""

    engine: str
    block_bytes: int
    depth: int

    @property
    def text(self) -> str:
        return f"{self.engine}, {size_text(self.block_bytes)} x {self.depth}"

    def frame_num(self, chunk_bytes: int) -> int:
        """Chunks in memory so that the depth is filled while one is in use, and twice that for reads and writes."""
        return 2 * math.ceil(self.depth * self.block_bytes / chunk_bytes) + 2


def most_frames(settings: Sequence[IoSetting], chunk_bytes: int) -> int:
    return max(setting.frame_num(chunk_bytes) for setting in settings)


def usable(
    settings: Sequence[IoSetting], chunk_bytes: int, notes: Console, *, lockable: float
) -> list[IoSetting]:
    """Return the settings without io_uring where it is not usable or may not lock their memory, of which it may lock
    ``lockable`` bytes, with a note that says why."""
    refusal = ring_refusal(most_frames(settings, chunk_bytes) * chunk_bytes, lockable=lockable)
    others = [setting for setting in settings if setting.engine != "io_uring"]
    if refusal is None or len(others) == len(settings):
        return list(settings)
    if not others:
        raise ConfigError(f"{refusal}; or give --engines threads")
    notes.print(f"threads only: {refusal}", soft_wrap=True, highlight=False)
    return others


def largest_block_bytes(chunk_bytes: int, *, path_num: int) -> int:
    """A request holds a chunk's piece on one of the folders at most."""
    return math.ceil(chunk_bytes / path_num / 4096) * 4096


def least_free_bytes(paths: Sequence[Path]) -> int:
    """For files of one size on all of these folders together."""
    groups = by_disk([str(path) for path in paths])
    return len(paths) * min(free_bytes(Path(group[0])) // len(group) for group in groups)


def check_memory(settings: Sequence[IoSetting], chunk_bytes: int) -> None:
    needed = most_frames(settings, chunk_bytes) * chunk_bytes
    if needed > memory_available_bytes() / 2:
        raise ConfigError(
            f"{size_text(needed)} of buffers do not fit into memory: give a smaller --depth, --block-bytes or "
            "--chunk-mib"
        )


class Disk:
    """Files of random bytes on the paths to measure, and timed passes over them."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        settings: Sequence[IoSetting],
        chunk_bytes: int,
        file_bytes: int | None,
        sample_s: float,
    ) -> None:
        """`file_bytes`: None for as many as the disk has room and speed for; enough for every setting."""
        from zerobench import _native

        self._core = _native.load()
        self._sample_s = sample_s
        self._sample_chunks: dict[tuple[str, IoSetting, str], int] = {}
        least = most_frames(settings, chunk_bytes) + 1
        if file_bytes is None:
            room = least_free_bytes(paths)
            if least * chunk_bytes > room:
                raise ConfigError(
                    f"{' and '.join(map(str, paths))}: {size_text(room)} are free and these settings need "
                    f"{size_text(least * chunk_bytes)}; free some, or give a smaller --depth, --block-bytes or "
                    "--chunk-mib"
                )
            file_bytes = max(least * chunk_bytes, self._fitting_bytes(paths, settings[0].engine))
        self.chunk_num = file_bytes // chunk_bytes
        if self.chunk_num < least:
            # Rounded down it would be refused again.
            enough_gib = math.ceil(least * chunk_bytes / GIB * 1000) / 1000
            raise ConfigError(
                f"--size-gib is too small for these settings: give {enough_gib:g} or more, or a smaller --depth, "
                "--block-bytes or --chunk-mib"
            )
        self._files = self._core.IoBench(
            directories=[str(path) for path in paths], chunk_bytes=chunk_bytes, chunk_num=self.chunk_num
        )
        self._chunk_bytes = self._files.chunk_bytes
        self._rates: dict[str, float] = {}  # by mode, the last one measured of any setting
        self._open(settings[0])
        while self._files.fill(chunk_num=max(1, _FILL_BYTES // self._chunk_bytes)):
            pass  # Ctrl-C counts between these calls

    @property
    def file_bytes(self) -> int:
        return int(self.chunk_num * self._chunk_bytes)

    def _fitting_bytes(self, paths: Sequence[Path], engine: str) -> int:
        rates = probe([str(path) for path in paths], IoChoice(engine, MIB, 32), seconds=0.6)
        return min(DEFAULT_BYTES, least_free_bytes(paths) // 4, int(rates.write_bytes_per_s * FILL_S))

    def _open(self, setting: IoSetting) -> None:
        self._files.open(
            engine=setting.engine,
            block_bytes=setting.block_bytes,
            depth=setting.depth,
            frame_num=setting.frame_num(self._chunk_bytes),
        )

    def sample(self, setting: IoSetting, mode: str) -> float:
        """Bytes per second of the pager."""
        self._open(setting)
        return self._timed("pager", setting, mode, lambda num: self._files.run(mode, chunk_num=num))

    def sample_raw(self, setting: IoSetting, mode: str) -> float:
        """Bytes per second of a plain loop."""
        self._files.close()

        def call(num: int) -> tuple[float, int]:
            seconds, moved = self._files.run_raw(
                setting.engine,
                mode=mode,
                block_bytes=setting.block_bytes,
                depth=setting.depth,
                chunk_num=num,
            )
            return seconds, moved

        return self._timed("raw", setting, mode, call)

    def _timed(
        self, side: str, setting: IoSetting, mode: str, call: Callable[[int], tuple[float, int]]
    ) -> float:
        """The first call finds out how many chunks last for a sample, from about as many as another setting took."""
        who = side, setting, mode
        likely = self._chunks_at(self._rates[mode], mode) if mode in self._rates else self.chunk_num // 8
        first = min(self.chunk_num, max(likely, setting.frame_num(self._chunk_bytes)))
        seconds, moved = call(self._sample_chunks.get(who, first))
        self._rates[mode] = moved / max(seconds, 1e-9)
        self._sample_chunks.setdefault(who, self._chunks_at(self._rates[mode], mode))
        return moved / seconds

    def _chunks_at(self, rate: float, mode: str) -> int:
        """Return how many of the disk's chunks last for a sample at this rate."""
        moved_per_chunk = self._chunk_bytes * (2 if mode == "both" else 1)
        return max(1, min(self.chunk_num, round(rate * self._sample_s / moved_per_chunk)))


@contextlib.contextmanager
def io_errors() -> Iterator[None]:
    """An OSError of the core, whose text names path and cure, as one of ours."""
    try:
        yield
    except OSError as error:
        raise Error(error.strerror or str(error)) from error
