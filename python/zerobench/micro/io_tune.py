"""`tune io`: the block size, depth and engine with which a path swaps fastest, found within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from zerobench.errors import ConfigError
from zerobench.host.consoles import print_document
from zerobench.host.io_settings import ENGINES, IoSettings, slow_path_warning, write_settings
from zerobench.host.storage import check_directories, device_facts, device_line, free_bytes, lockable_bytes
from zerobench.micro.io_disk import Disk, IoSetting, check_memory, io_errors, largest_block_bytes, usable
from zerobench.micro.output import (
    TextTable,
    machine_line,
    new_progress,
    print_comment,
    print_table,
    size_text,
)
from zerobench.results.sizes import MIB
from zerobench.results.stats import median

BLOCKS = tuple(1 << power for power in range(17, 24))  # 128 KiB to 8 MiB
DEPTHS = (2, 4, 8, 16, 32, 64, 128)
MOST_IN_FLIGHT_BYTES = 64 * MIB
LIKELY_IN_FLIGHT_BYTES = 16 * MIB
FINALIST_NUM = 4
EQUAL_SHARE = 0.98  # settings this near to the fastest count as equal; the one with the least memory is taken
SAMPLE_S = 0.15


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Path to search the settings of, and the time that the search takes."""

    path: Path
    seconds: float
    file_bytes: int | None
    chunk_bytes: int
    settings_file: Path

    def check(self) -> None:
        check_directories([self.path])
        if self.chunk_bytes < 4096 or self.chunk_bytes % 4096:
            raise ConfigError(
                f"a chunk of {self.chunk_bytes} bytes is not a multiple of 4096: give another --chunk-mib"
            )
        if not 1 <= self.seconds < math.inf:
            raise ConfigError(f"--seconds {self.seconds:g} is too short to measure: give 1 or more")

    def fitting(self, candidates: Sequence[IoSetting]) -> list[IoSetting]:
        """Return the candidates with buffers of at most half of the file, so that the file is not swapped through
        memory whole, and with blocks that fit in a chunk. Raises ConfigError if there is no such candidate."""
        largest = largest_block_bytes(self.chunk_bytes, path_num=1)
        most = (free_bytes(self.path) if self.file_bytes is None else self.file_bytes) // 2
        found = [
            each
            for each in candidates
            if each.block_bytes <= largest and each.frame_num(self.chunk_bytes) * self.chunk_bytes <= most
        ]
        if not found:
            what = f"what is free on {self.path}" if self.file_bytes is None else "--size-gib"
            raise ConfigError(f"{what} is too little for any setting: give more, or a smaller --chunk-mib")
        return found


def candidates_for(engines: Sequence[str]) -> list[IoSetting]:
    """The likely ones first, since time may end before all were tried."""
    found = [
        IoSetting(engine=engine, block_bytes=block_bytes, depth=depth)
        for engine in engines
        for block_bytes in BLOCKS
        for depth in DEPTHS
        if block_bytes * depth <= MOST_IN_FLIGHT_BYTES
    ]
    return sorted(
        found, key=lambda each: abs(math.log2(each.block_bytes * each.depth / LIKELY_IN_FLIGHT_BYTES))
    )


def choose(rates: dict[IoSetting, list[float]]) -> IoSetting:
    """The fastest by median; of equals the one that needs the least memory."""
    best = max(median(values) for values in rates.values())
    equal = [setting for setting, values in rates.items() if median(values) >= EQUAL_SHARE * best]
    return min(equal, key=lambda setting: (setting.block_bytes * setting.depth, setting.depth))


def search(
    candidates: Sequence[IoSetting],
    sample: Callable[[IoSetting], float],
    rounds: Callable[[], Iterator[bool]],
) -> tuple[IoSetting, dict[IoSetting, list[float]]]:
    """Each candidate once while ``rounds`` says that it is early, then the fastest ones in turn until it ends."""
    rates: dict[IoSetting, list[float]] = {}
    waiting = list(candidates)
    finalists: list[IoSetting] = []
    turn = 0
    for early in rounds():
        if waiting and (early or not rates):
            setting = waiting.pop(0)
            rates[setting] = [sample(setting)]
            continue
        if not finalists:
            finalists = sorted(rates, key=lambda each: -rates[each][0])[:FINALIST_NUM]
        rates[finalists[turn % len(finalists)]].append(sample(finalists[turn % len(finalists)]))
        turn += 1
    compared = finalists or list(rates)
    return choose({setting: rates[setting] for setting in compared}), rates


def run_tune_io(options: TuneOptions, *, console: Console, notes: Console, as_json: bool = False) -> int:
    """Search, show and write the settings; the exit code. ``as_json``: also print them as one JSON document."""
    fitting = options.fitting(candidates_for(ENGINES))
    candidates = usable(fitting, options.chunk_bytes, notes, lockable=lockable_bytes())
    check_memory(candidates, options.chunk_bytes)
    for line in (machine_line(), device_line(device_facts(options.path))):
        print_comment(console, line)
    with new_progress(notes) as bar, io_errors():
        task = bar.add_task("filling the file", total=options.seconds)
        disk = Disk(
            [options.path],
            settings=candidates,
            chunk_bytes=options.chunk_bytes,
            file_bytes=options.file_bytes,
            sample_s=SAMPLE_S,
        )
        begin = time.monotonic()

        def rounds() -> Iterator[bool]:
            while (passed := time.monotonic() - begin) < 0.9 * options.seconds or passed == 0:
                bar.update(task, completed=passed, description="searching")
                yield passed < 0.6 * options.seconds

        best, rates = search(candidates, lambda setting: disk.sample(setting, "both"), rounds)
        settings = IoSettings(
            engine=best.engine,
            block_bytes=best.block_bytes,
            depth=best.depth,
            read_bytes_per_s=disk.sample(best, "read"),
            write_bytes_per_s=disk.sample(best, "write"),
            both_bytes_per_s=median(rates[best]),
            tuned=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
    write_settings(options.path, settings, file=options.settings_file)
    verdict = show(options, settings, rates, len(candidates), disk.file_bytes, console=console)
    if as_json:
        content = {
            "path": options.path,
            "settings_file": options.settings_file,
            "settings": settings.model_dump(),
            "tried": [{**asdict(tried), "bytes_per_s": found} for tried, found in rates.items()],
        }
        print_document(verdict, content)
    if warning := slow_path_warning(options.path, settings):
        notes.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    return 0


def show(
    options: TuneOptions,
    settings: IoSettings,
    rates: dict[IoSetting, list[float]],
    candidate_num: int,
    file_bytes: int,
    *,
    console: Console,
) -> str:
    """Print the table and the sentence below it; return the sentence."""
    table = TextTable(
        title="Reads and writes together: the fastest, and those that were measured once",
        columns=("engine", "block", "depth", "GB/s", "samples"),
    )
    ranked = sorted(rates, key=lambda setting: (len(rates[setting]) == 1, -median(rates[setting])))
    best = IoSetting(engine=settings.engine, block_bytes=settings.block_bytes, depth=settings.depth)
    why = (
        ""
        if best == ranked[0]
        else f" (within {100 * (1 - EQUAL_SHARE):.0f} % of the fastest, in less memory)"
    )
    table.sections.append(
        [
            [
                setting.engine,
                size_text(setting.block_bytes),
                f"{setting.depth}",
                f"{median(rates[setting]) / 1e9:.2f}",
                f"{len(rates[setting])}",
            ]
            for setting in ranked[:10]
        ]
    )
    print_table(console, table)
    verdict = (
        f"{len(rates)} of {candidate_num} settings tried on {size_text(file_bytes)}; chosen for {options.path}: "
        f"{settings.text}{why}; read {settings.read_bytes_per_s / 1e9:.2f}, write "
        f"{settings.write_bytes_per_s / 1e9:.2f}, together {settings.both_bytes_per_s / 1e9:.2f} GB/s; written to "
        f"{options.settings_file}"
    )
    console.print(verdict, soft_wrap=True, highlight=False)
    return verdict
