"""`bench comm` on GPUs: a communicator of zerobench beside torch.distributed's NCCL, on ranks of this host.

This part runs in the command, which initialises no CUDA (what is forked after that cannot use it) and imports no torch
before its ranks start; comm_gpu_ranks.py runs in the ranks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.console import Console

from zerobench.micro.comm import answers_of, slowest_times_s, wrong_cell
from zerobench.micro.comm_gpu_case import OURS, TIMED_DTYPE, TORCH, CommGpuOptions
from zerobench.micro.link import Link, measure_link
from zerobench.micro.output import (
    MicroReport,
    OutputFile,
    TextTable,
    machine_line,
    print_comment,
    print_table,
    ratio_cell,
    ratio_json,
    size_text,
)
from zerobench.micro.ranks import Message
from zerobench.micro.sampling import as_json, speed_ratio
from zerobench.results.stats import Ratio, median

NOTES = (
    f"Times are medians over the pairs of the slowest rank's time of {TIMED_DTYPE} calls put in back to back, between "
    "two synchronisations of the device; vs torch is the median of the ratios of each pair with its 95 % interval (of "
    "6 pairs or more); of link is busbw over copies from one GPU to another in the same run; wrong counts elements "
    "over checks in bfloat16 and float32 before and after the timing"
)


def run_comm_gpu(options: CommGpuOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code: 1 where a result was wrong."""
    machine = machine_line(options.gpus)
    print_comment(console, machine)
    link = measure_link()
    print_comment(console, link_text(link))
    rows: list[dict[str, Any]] = []
    tables = []
    with tempfile.TemporaryDirectory(prefix="zerobench-") as scratch:
        for world_size in options.world_sizes:
            found = measure_world(options, world_size, link, scratch, notes)
            rows += found
            tables.append(comm_table(found, world_size, options.side))
            print_table(console, tables[-1])
    print_comment(console, NOTES)
    settings = {
        "repeats": options.repeats,
        "world_sizes": list(options.world_sizes),
        "dtype": TIMED_DTYPE,
        "communicator": options.communicator,
        "symmetric": options.symmetric,
        "link_gb_s": link.gb_s,
        "link_is_direct": link.is_direct,
    }
    output.write(
        MicroReport(
            benchmark="comm",
            machine=machine,
            gpus=options.gpus,
            settings=settings,
            rows=rows,
            tables=tables,
            notes=f"{link_text(link)}. {NOTES}",
        )
    )
    return int(any(row["wrong"] or row["wrong_torch"] for row in rows))


def link_text(link: Link) -> str:
    way = "directly" if link.is_direct else "over host memory"
    return f"GPU 0 copies to GPU 1 {way} at {median(link.gb_s):.1f} GB/s"


def measure_world(
    options: CommGpuOptions, world_size: int, link: Link, scratch: str, notes: Console
) -> list[dict[str, Any]]:
    # Imports torch, which the ranks need in any case.
    from zerobench.micro.comm_gpu_ranks import run_rank

    cases = options.cases(world_size)
    target = partial(run_rank, cases=cases, options=options)
    who = f"{world_size} GPUs"
    answers = answers_of(
        target, len(cases), world_size, options.repeats, who=who, scratch=scratch, notes=notes
    )
    return [
        {"communicator": options.side} | comm_row(collective, size, world_size, link, answer)
        for (collective, size), answer in zip(cases, answers, strict=True)
    ]


def comm_row(
    collective: str, size_bytes: int, world_size: int, link: Link, answers: dict[int, Message]
) -> dict[str, Any]:
    """One line of the table, from what all ranks measured."""
    times_s = slowest_times_s(collective, size_bytes, world_size, answers)
    first = answers[0]
    algbw = size_bytes / median(times_s[OURS]) / 1e9
    busbw = algbw * first["bus_factor"]
    return {
        "collective": collective,
        "world_size": world_size,
        "size_bytes": size_bytes,
        "calls_per_sample": first["calls"],
        "time_us": {side: median(samples) * 1e6 for side, samples in times_s.items()},
        "algbw_gb_s": algbw,
        "busbw_gb_s": busbw,
        "link_gb_s": median(link.gb_s),
        "busbw_of_link": busbw / median(link.gb_s),
        "ratio_to_torch": ratio_json(speed_ratio(times_s, OURS, TORCH)),
        "wrong": sum(answers[rank]["wrong"][OURS] for rank in answers),
        "wrong_torch": sum(answers[rank]["wrong"][TORCH] for rank in answers),
        "samples_us": as_json(times_s),
    }


def comm_table(rows: Iterable[dict[str, Any]], world_size: int, side: str) -> TextTable:
    table = TextTable(
        title=f"{world_size} GPUs, {TIMED_DTYPE}, {side}",
        columns=(
            "collective", "size", "time us", "algbw GB/s", "busbw GB/s", "of link", "torch us", "vs torch", "wrong"
        ),
    )  # fmt: skip
    for _, group in itertools.groupby(rows, key=lambda row: row["collective"]):
        table.sections.append([comm_cells(row) for row in group])
    return table


def comm_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["collective"],
        size_text(row["size_bytes"]),
        f"{row['time_us'][OURS]:.1f}",
        f"{row['algbw_gb_s']:.2f}",
        f"{row['busbw_gb_s']:.2f}",
        f"{row['busbw_of_link']:.2f}",
        f"{row['time_us'][TORCH]:.1f}",
        ratio_cell(Ratio(**row["ratio_to_torch"])),
        wrong_cell(row, TORCH),
    ]
