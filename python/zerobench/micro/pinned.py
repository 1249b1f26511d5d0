"""`bench pinned`: host memory for transfers, ours beside torch's: how soon it is ready and how fast it is copied.

torch is imported when measuring starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from zerobench.errors import ConfigError
from zerobench.host.gpus import Gpu
from zerobench.host.machine import memory_available_bytes
from zerobench.micro.checks import check_threads
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
from zerobench.micro.pinned_copies import (
    DIRECTIONS,
    HostMemory,
    copy_calls_on_gpus,
    copy_calls_on_host,
    sample_calls,
)
from zerobench.micro.pinned_ready import OURS, TORCH, TOUCH, Order, Ready, measure_ready
from zerobench.micro.sampling import as_json, rotated, speed_ratio
from zerobench.results.stats import Ratio, median

ON_HOST = "within the host"

NOTES = (
    "ready: seconds until so much memory can be copied from and to a GPU without a detour, each in a fresh process, in "
    "turn; torch is pin_memory (cudaHostAlloc); mapped is what lies under what was asked for, huge the share of it in "
    "huge pages; copies: all GPUs of a row at once, bytes of both ways together; ratios are medians of the ratios of "
    "each pair with their 95 % interval"
)
NOTES_WITHOUT_GPU = (
    "without a GPU nothing is registered and nothing crosses a bus: ready is memory with every page in place, beside "
    "one thread that touches as much; copies are within the host, beside torch's own memory; huge is the share of the "
    "mapping in huge pages; ratios are medians of the ratios of each pair with their 95 % interval"
)


@dataclass(frozen=True, kw_only=True)
class PinnedOptions:
    """Sizes, repeats and threads to measure with."""

    ready_bytes: int
    copy_bytes: int
    repeats: int
    ready_repeats: int
    threads: int
    gpus: tuple[Gpu, ...] = ()  # none: on the host alone

    def check(self) -> None:
        for name, value in (("--repeats", self.repeats), ("--ready-repeats", self.ready_repeats)):
            if value < 6:
                raise ConfigError(f"{name} {value} is too few for a median with an interval: give at least 6")
        for name, value in (("--ready-gib", self.ready_bytes), ("--copy-bytes", self.copy_bytes)):
            if value < 1:
                raise ConfigError(f"{name} must be positive")
        check_threads(self.threads)
        needed = max(self.ready_bytes, 4 * self.copy_bytes * max(1, len(self.gpus)))
        available = memory_available_bytes()
        if needed > available:
            raise ConfigError(
                f"{size_text(needed)} of host memory are needed and {size_text(available)} are available: lower "
                "--ready-gib or --copy-bytes"
            )


def run_pinned(options: PinnedOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write."""
    machine = machine_line(options.gpus)
    print_comment(console, machine)
    directions = DIRECTIONS if options.gpus else (ON_HOST,)
    groups = gpu_groups(options.gpus)
    copies = [(group, direction) for group in groups for direction in directions]
    with new_progress(notes) as bar:
        task = bar.add_task("pinned", total=2 * options.ready_repeats + len(copies) * options.repeats)

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what)

        ready = measure_ready_sides(options, tick)  # before this process takes memory, or a GPU
        rows = [ready, *measure_copies(options, copies, tick)]
    tables = [ready_table(ready), copy_table(rows[1:])]
    for table in tables:
        print_table(console, table)
    text = NOTES if options.gpus else NOTES_WITHOUT_GPU
    print_comment(console, text)
    settings = {
        "repeats": options.repeats,
        "ready_repeats": options.ready_repeats,
        "threads": options.threads,
        "device": "cuda" if options.gpus else "cpu",
    }
    output.write(
        MicroReport(
            benchmark="pinned",
            machine=machine,
            gpus=options.gpus,
            settings=settings,
            rows=rows,
            tables=tables,
            notes=text,
        )
    )
    return 0


def gpu_groups(gpus: Sequence[Gpu]) -> list[tuple[Gpu, ...]]:
    """Each GPU alone, then all together; one group of none without GPUs."""
    if not gpus:
        return [()]
    return [*((gpu,) for gpu in gpus), *([tuple(gpus)] if len(gpus) > 1 else [])]


def measure_ready_sides(options: PinnedOptions, tick: Callable[[str], None]) -> dict[str, Any]:
    other = TORCH if options.gpus else TOUCH
    found: dict[str, list[Ready]] = {OURS: [], other: []}
    for index in range(options.ready_repeats):
        for side in rotated([OURS, other], index):
            tick(f"{size_text(options.ready_bytes)} ready, {side}")
            order = Order(
                side=side,
                size_bytes=options.ready_bytes,
                gpu=options.gpus[0].index if options.gpus else None,
                threads=options.threads,
            )
            found[side].append(measure_ready(order))
    times_s = {side: [one.seconds for one in ones] for side, ones in found.items()}
    ours = found[OURS]
    return {
        "kind": "ready",
        "size_bytes": options.ready_bytes,
        "threads": options.threads,
        "beside": other,
        "time_s": {side: median(samples) for side, samples in times_s.items()},
        "fill_s": median([one.fill_s or 0.0 for one in ours]),
        "register_s": median([one.register_s or 0.0 for one in ours]),
        "mapped_bytes": ours[0].mapped_bytes,
        "huge_bytes": median([one.huge_bytes or 0 for one in ours]),
        "ratio_to_other": ratio_json(speed_ratio(times_s, OURS, other)),
        "samples_us": as_json(times_s),
    }


def measure_copies(
    options: PinnedOptions, copies: Sequence[tuple[tuple[Gpu, ...], str]], tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    from zerobench import _native

    core = _native.load()
    parts = None
    if options.gpus:
        import torch

        device = _native.load_cuda().make_device(
            options.gpus[0].index, on_out_of_memory=torch.cuda.empty_cache
        )
        parts = device.parts()
    memory = HostMemory(
        core,
        size_bytes=options.copy_bytes,
        block_num=2 * max(1, len(options.gpus)),
        threads=options.threads,
        parts=parts,
    )
    rows = []
    for group, direction in copies:
        calls = copy_calls_on_gpus(memory, group, direction) if group else copy_calls_on_host(memory)
        what = f"{direction}, {len(group)} GPUs" if group else direction
        times_s = sample_calls(calls, options.repeats, lambda what=what: tick(what))  # type: ignore[misc]
        moved = options.copy_bytes * max(1, len(group)) * (2 if direction == DIRECTIONS[2] else 1)
        rows.append(
            {
                "kind": "copy",
                "direction": direction,
                "gpus": [gpu.index for gpu in group],
                "size_bytes": options.copy_bytes,
                "time_ms": {side: median(samples) * 1e3 for side, samples in times_s.items()},
                "gb_s": {side: moved / median(samples) / 1e9 for side, samples in times_s.items()},
                "ratio_to_torch": ratio_json(speed_ratio(times_s, OURS, TORCH)),
                "samples_us": as_json(times_s),
            }
        )
    return rows


def ready_table(row: dict[str, Any]) -> TextTable:
    other = row["beside"]
    table = TextTable(
        title=f"{size_text(row['size_bytes'])} of host memory ready, {row['threads']} threads",
        columns=("ready s", "fill s", "register s", "mapped", "huge %", f"{other} s", f"vs {other}"),
    )
    share = 100 * row["huge_bytes"] / row["mapped_bytes"]
    table.sections.append(
        [
            [
                f"{row['time_s'][OURS]:.3f}",
                f"{row['fill_s']:.3f}",
                f"{row['register_s']:.3f}",
                size_text(row["mapped_bytes"]),
                f"{share:.0f}",
                f"{row['time_s'][other]:.3f}",
                ratio_cell(Ratio(**row["ratio_to_other"])),
            ]
        ]
    )
    return table


def copy_table(rows: Sequence[dict[str, Any]]) -> TextTable:
    table = TextTable(
        title=f"Copies of {size_text(rows[0]['size_bytes'])}",
        columns=("direction", "GPUs", "time ms", "GB/s", "torch GB/s", "vs torch"),
    )
    for row in rows:
        cells = [
            row["direction"],
            ",".join(str(index) for index in row["gpus"]) or "none",
            f"{row['time_ms'][OURS]:.3f}",
            *(f"{row['gb_s'][side]:.2f}" for side in (OURS, TORCH)),
            ratio_cell(Ratio(**row["ratio_to_torch"])),
        ]
        if not table.sections or row["gpus"] != rows[rows.index(row) - 1]["gpus"]:
            table.sections.append([])
        table.sections[-1].append(cells)
    return table
