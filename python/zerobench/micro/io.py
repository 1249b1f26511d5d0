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

from zerobench.errors import ConfigError
from zerobench.host.disks import ring_refusal
from zerobench.host.io_settings import ENGINES, MOST_DEPTH
from zerobench.host.storage import check_directories, device_facts, device_line, lockable_bytes
from zerobench.micro.checks import check_known, check_repeats
from zerobench.micro.io_disk import Disk, IoSetting, check_memory, io_errors, largest_block_bytes, usable
from zerobench.micro.output import (
    MicroReport,
    OutputFile,
    TextTable,
    machine_line,
    new_progress,
    print_comment,
    print_table,
    ratio_cell,
    ratio_json,
    size_text,
)
from zerobench.micro.sampling import rotated
from zerobench.results.sizes import MIB
from zerobench.results.stats import Ratio, median, median_of_ratios, summarise

MODES = ("read", "write", "both")
# What a disk needs to show its best differs: the limit of a mode is the fastest of these, whatever is measured.
RAW_CANDIDATES = (
    ("io_uring", MIB, 64),
    ("io_uring", 4 * MIB, 32),
    ("threads", MIB, 32),
    ("threads", 4 * MIB, 16),
)
NOTES = (
    "GB/s is what the pager moves (both: chunks read, then written behind, half of the bytes each way); raw is a plain "
    "loop over the same files in the same rounds, the fastest of four when that was tried before them; of raw is the "
    "median of the ratios of each pair with its 95 % interval (of 6 pairs or more); O_DIRECT, random bytes"
)


@dataclass(frozen=True, kw_only=True)
class IoOptions:
    """Paths, engines, sizes and modes to measure."""

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
        check_known("--engines", self.engines, ENGINES)
        check_known("--modes", self.modes, MODES)
        sizes = [("--block-bytes", size) for size in self.block_bytes] + [("--chunk-mib", self.chunk_bytes)]
        for option, size in sizes:
            if size < 4096 or size % 4096:
                raise ConfigError(
                    f"{option}: {size} bytes are not a block for O_DIRECT: give a multiple of 4096"
                )
        largest = largest_block_bytes(self.chunk_bytes, path_num=len(self.paths))
        for size in self.block_bytes:
            if size > largest:
                raise ConfigError(
                    f"--block-bytes {size} is more than the {largest} bytes of a chunk that one folder holds: give "
                    "less, or a larger --chunk-mib"
                )
        for depth in self.depths:
            if not 1 <= depth <= MOST_DEPTH:
                raise ConfigError(f"--depth {depth} is not valid: give 1 to {MOST_DEPTH}")
        check_repeats(self.repeats)
        if not 0 < self.sample_s < math.inf:
            raise ConfigError(f"--sample-seconds {self.sample_s:g} is not valid: give a time above 0")
        check_memory(self.settings(), self.chunk_bytes)


def run_io(options: IoOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code."""
    machine = machine_line()
    devices = [device_facts(path) for path in options.paths]
    for line in (machine, *map(device_line, devices)):
        print_comment(console, line)
    rows: list[dict[str, Any]] = []
    settings = usable(options.settings(), options.chunk_bytes, notes, lockable=lockable_bytes())
    with new_progress(notes) as bar, io_errors():
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
    print_table(console, table)
    print_comment(console, NOTES)
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
    candidates = raw_candidates()
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


def raw_candidates() -> list[IoSetting]:
    """Without io_uring where it may not be used, or may not lock the memory of its loops."""
    found = [
        IoSetting(engine=engine, block_bytes=block_bytes, depth=depth)
        for engine, block_bytes, depth in RAW_CANDIDATES
    ]
    most_bytes = max(each.block_bytes * each.depth for each in found if each.engine == "io_uring")
    without = "io_uring" if ring_refusal(most_bytes, lockable=lockable_bytes()) is not None else None
    return [each for each in found if each.engine != without]


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
