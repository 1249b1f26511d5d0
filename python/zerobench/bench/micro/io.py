"""`bench io`: the pager and its engines beside plain loops over the same files, which are what the disk gives.

torch is imported with the core, when measuring starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from zerobench.bench.machine import memory_available_bytes
from zerobench.bench.micro.output import (
    MicroReport,
    OutputFile,
    TextTable,
    machine_line,
    new_progress,
    ratio_cell,
    ratio_json,
    size_text,
)
from zerobench.bench.micro.sampling import rotated
from zerobench.bench.storage import check_directories, device_facts, device_line, free_bytes
from zerobench.errors import ConfigError, Error
from zerobench.report.stats import Ratio, median, median_of_ratios, summarise

MODES = ("read", "write", "both")
ENGINES = ("io_uring", "threads")
MIB = 1 << 20
DEFAULT_BYTES = 8 << 30  # of all files together, where a quarter of the free space allows
FILL_S = 10.0  # files are no larger than what is written in this time
# What a disk needs to show its best differs: the limit of a mode is the fastest of these.
RAW_CANDIDATES = (
    ("io_uring", MIB, 64),
    ("io_uring", 4 * MIB, 32),
    ("threads", MIB, 32),
    ("threads", 4 * MIB, 16),
)
NOTES = (
    "GB/s is what the pager moves (both: chunks read, then written behind, half of the bytes each way); raw is the "
    "fastest plain loop over the same files in the same round; of raw is the median of the ratios of each pair with "
    "its 95 % interval; O_DIRECT, random bytes"
)


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


@dataclass(frozen=True, kw_only=True)
class IoOptions:
    """What to measure."""

    paths: Sequence[Path]
    engines: Sequence[str]
    block_bytes: Sequence[int]
    depths: Sequence[int]
    modes: Sequence[str]
    chunk_bytes: int
    file_bytes: int | None  # of all files together; None: DEFAULT_BYTES where there is room
    repeats: int
    sample_s: float

    def settings(self) -> list[IoSetting]:
        return [
            IoSetting(engine=engine, block_bytes=block_bytes, depth=depth)
            for engine in self.engines
            for block_bytes in self.block_bytes
            for depth in self.depths
        ]

    def check(self) -> None:
        check_directories(list(self.paths))
        for option, values, known in (("--engines", self.engines, ENGINES), ("--modes", self.modes, MODES)):
            for value in values:
                if value not in known:
                    raise ConfigError(f"{option} {value!r} is unknown: choose of {', '.join(known)}")
        for size in (*self.block_bytes, self.chunk_bytes):
            if size < 4096 or size % 4096:
                raise ConfigError(f"{size} bytes are no block for O_DIRECT: give a multiple of 4096")
        for depth in self.depths:
            if not 1 <= depth <= 1024:
                raise ConfigError(f"--depth {depth} is not possible: give 1 to 1024")
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} measures nothing: give 1 or more")
        if not self.sample_s > 0:
            raise ConfigError(f"--sample-seconds {self.sample_s:g} measures nothing: give more than 0")
        check_memory(self.settings(), self.chunk_bytes)


def most_frames(settings: Sequence[IoSetting], chunk_bytes: int) -> int:
    return max(setting.frame_num(chunk_bytes) for setting in settings)


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
        self._sample_chunks: dict[tuple[object, str], int] = {}
        least = most_frames(settings, chunk_bytes) + 1
        if file_bytes is None:
            file_bytes = max(least * chunk_bytes, self._fitting_bytes(paths, settings[0].engine))
        self.chunk_num = file_bytes // chunk_bytes
        if self.chunk_num < least:
            raise ConfigError(
                f"--size-gib is too small for these settings: give {least * chunk_bytes / (1 << 30):.3g} or more, or a "
                "smaller --depth, --block-bytes or --chunk-mib"
            )
        self._files = self._core.IoBench(
            directories=[str(path) for path in paths], chunk_bytes=chunk_bytes, chunk_num=self.chunk_num
        )
        self._chunk_bytes = self._files.chunk_bytes
        self._open(settings[0])
        self._files.fill()

    @property
    def file_bytes(self) -> int:
        return int(self.chunk_num * self._chunk_bytes)

    def _fitting_bytes(self, paths: Sequence[Path], engine: str) -> int:
        room = sum(free_bytes(path) for path in paths) // 4
        rates = [
            self._core.probe_path(str(path), seconds=0.6, engine=engine, most_bytes=256 * MIB)
            for path in paths
        ]
        filled = int(sum(rate.write_bytes_per_s for rate in rates) * FILL_S)
        return min(DEFAULT_BYTES, room, filled)

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
        return self._timed(setting, mode, lambda num: self._files.run(mode, chunk_num=num))

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

        return self._timed(("raw", setting), mode, call)

    def _timed(self, who: object, mode: str, call: Callable[[int], tuple[float, int]]) -> float:
        """The first call finds out how many chunks last for a sample."""
        known = self._sample_chunks.get((who, mode))
        first = known or max(1, self.chunk_num // 8)
        seconds, moved = call(first)
        if known is None:
            fitting = round(first * self._sample_s / max(seconds, 1e-9))
            self._sample_chunks[who, mode] = max(1, min(self.chunk_num, fitting))
        return moved / seconds


def run_io(options: IoOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code."""
    machine = machine_line()
    devices = [device_facts(path) for path in options.paths]
    for line in (machine, *map(device_line, devices)):
        console.print(f"# {line}", highlight=False, soft_wrap=True)
    rows: list[dict[str, Any]] = []
    with new_progress(notes) as bar, io_errors():
        settings = options.settings()
        rounds = len(RAW_CANDIDATES) + options.repeats * (len(settings) + 1)
        task = bar.add_task("filling the files", total=len(options.modes) * rounds)
        disk = Disk(
            options.paths,
            settings=settings,
            chunk_bytes=options.chunk_bytes,
            file_bytes=options.file_bytes,
            sample_s=options.sample_s,
        )
        for mode in options.modes:
            rows += measure_mode(
                disk,
                settings,
                mode,
                options.repeats,
                lambda what: bar.update(task, advance=1, description=what),
            )
    files = f"{size_text(disk.file_bytes)} in {len(options.paths)} file(s)"
    table = io_table(rows, title=f"I/O, {files}")
    console.print(table)
    console.print(f"# {NOTES}", highlight=False, soft_wrap=True)
    output.write(
        MicroReport(
            benchmark="io",
            machine="; ".join([machine, *map(device_line, devices)]),
            settings={
                "devices": devices,
                "file_bytes": disk.file_bytes,
                "chunk_bytes": options.chunk_bytes,
                "repeats": options.repeats,
                "sample_s": options.sample_s,
            },
            rows=rows,
            tables=[table],
            notes=NOTES,
        )
    )
    return 0


def measure_mode(
    disk: Disk, settings: Sequence[IoSetting], mode: str, repeats: int, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    candidates = [
        IoSetting(engine=engine, block_bytes=block_bytes, depth=depth)
        for engine, block_bytes, depth in RAW_CANDIDATES
        if engine in {setting.engine for setting in settings}
    ]
    found = {}
    for candidate in candidates:
        disk.sample_raw(candidate, mode)
        found[candidate] = disk.sample_raw(candidate, mode)
        tick(f"{mode}: raw")
    best = max(candidates, key=lambda candidate: found[candidate])
    rates: dict[str, list[float]] = {"raw": [], **{setting.text: [] for setting in settings}}
    by_text = {setting.text: setting for setting in settings}
    for setting in settings:
        disk.sample(setting, mode)
    for index in range(repeats):
        for name in rotated(list(rates), index):
            rates[name].append(
                disk.sample_raw(best, mode) if name == "raw" else disk.sample(by_text[name], mode)
            )
            tick(f"{mode}: {name}")
    return [row(setting, mode, rates[setting.text], best, rates["raw"]) for setting in settings]


def row(
    setting: IoSetting, mode: str, rates: Sequence[float], raw: IoSetting, raw_rates: Sequence[float]
) -> dict[str, Any]:
    return {
        "mode": mode,
        "engine": setting.engine,
        "block_bytes": setting.block_bytes,
        "depth": setting.depth,
        "gb_s": median(rates) / 1e9,
        "raw": raw.text,
        "raw_gb_s": median(raw_rates) / 1e9,
        "ratio_to_raw": ratio_json(median_of_ratios(rates, raw_rates)),
        "samples_gb_s": {
            name: summarise([value / 1e9 for value in values]).model_dump(mode="json")
            for name, values in (("pager", rates), ("raw", raw_rates))
        },
    }


def io_table(rows: Sequence[dict[str, Any]], *, title: str) -> TextTable:
    table = TextTable(
        title=title, columns=("mode", "engine", "block", "depth", "GB/s", "raw GB/s", "of raw", "raw loop")
    )
    for mode in dict.fromkeys(found["mode"] for found in rows):
        table.sections.append([cells(found) for found in rows if found["mode"] == mode])
    return table


def cells(found: dict[str, Any]) -> list[str]:
    return [
        found["mode"],
        found["engine"],
        size_text(found["block_bytes"]),
        f"{found['depth']}",
        f"{found['gb_s']:.2f}",
        f"{found['raw_gb_s']:.2f}",
        ratio_cell(Ratio(**found["ratio_to_raw"])),
        found["raw"],
    ]


class io_errors:
    """An OSError of the core, whose text names path and cure, as one of ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise Error(error.strerror or str(error)) from error
