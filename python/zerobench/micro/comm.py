"""`bench comm`: zerobench's shared-memory collectives beside gloo and memcpy, on ranks of this host.

This part runs in the command, which imports no torch before its ranks start; comm_ranks.py runs in the ranks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.console import Console

from zerobench.errors import Error
from zerobench.host.machine import cpus_usable
from zerobench.micro.comm_case import BARRIER, GLOO, LATENCY_BYTES, MEMCPY, SHM, CommOptions
from zerobench.micro.comm_ranks import run_rank
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
from zerobench.micro.ranks import Message, Ranks, Target
from zerobench.micro.sampling import as_json, speed_ratio
from zerobench.results.stats import Ratio, median

NOTES = (
    "Times are medians over the pairs of the slowest rank's time; vs gloo and of limit are medians of the ratios of "
    "each pair with their 95 % interval (of 6 pairs or more); the limit is memcpy over the same working set, one rank "
    "a core at once and from the memory that the collective reads, times the bytes that the algorithm must touch; "
    "zerobench's collectives and memcpy are called by a loop of the core, as the engine calls them, gloo by "
    "torch.distributed"
)


def run_comm(options: CommOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code: 1 where a result was wrong."""
    machine = machine_line()
    print_comment(console, machine)
    rows: list[dict[str, Any]] = []
    tables = []
    with tempfile.TemporaryDirectory(prefix="zerobench-") as scratch:
        for world_size in options.world_sizes:
            found = measure_world(options, world_size, scratch, notes)
            rows += found
            tables.append(comm_table(found, world_size))
            print_table(console, tables[-1])
    print_comment(console, NOTES)
    settings = {"repeats": options.repeats, "world_sizes": list(options.world_sizes)}
    output.write(
        MicroReport(
            benchmark="comm", machine=machine, settings=settings, rows=rows, tables=tables, notes=NOTES
        )
    )
    return int(any(row["wrong"] or row["wrong_gloo"] for row in rows))


def measure_world(
    options: CommOptions, world_size: int, scratch: str, notes: Console
) -> list[dict[str, Any]]:
    cases = options.cases(world_size)
    target = partial(run_rank, cases=cases, options=options)
    who = f"{world_size} ranks"
    answers = answers_of(
        target, len(cases), world_size, options.repeats, who=who, scratch=scratch, notes=notes
    )
    return [
        comm_row(collective, size, world_size, answer)
        for (collective, size), answer in zip(cases, answers, strict=True)
    ]


def answers_of(
    target: Target,
    case_num: int,
    world_size: int,
    repeats: int,
    *,
    who: str,
    scratch: str,
    notes: Console,
) -> list[dict[int, Message]]:
    """Run ``target`` on ranks and return their messages about each case, by rank; a bar shows how far ``who`` are."""
    answers: list[dict[int, Message]] = [{} for _ in range(case_num)]
    # The bar's thread starts after the ranks were forked.
    with Ranks(target, world_size=world_size, scratch=scratch) as ranks, new_progress(notes) as bar:
        task = bar.add_task(who, total=case_num * (repeats + 1))
        for rank, message in ranks.messages():
            if "case" in message:
                answers[message["case"]][rank] = message
            else:
                bar.update(task, advance=1, description=f"{who}: {message['doing']}")
    return answers


def slowest_times_s(
    collective: str, size_bytes: int, world_size: int, answers: dict[int, Message]
) -> dict[str, list[float]]:
    """Samples by side, each the slowest rank's. Error where a rank has none."""
    if len(answers) != world_size:
        raise Error(
            f"only {len(answers)} of {world_size} ranks measured {collective} of {size_text(size_bytes)}"
        )
    return {
        side: [
            max(values) for values in zip(*(answers[rank]["times_s"][side] for rank in answers), strict=True)
        ]
        for side in answers[0]["times_s"]
    }


def comm_row(
    collective: str, size_bytes: int, world_size: int, answers: dict[int, Message]
) -> dict[str, Any]:
    """One line of the table, from what all ranks measured."""
    times_s = slowest_times_s(collective, size_bytes, world_size, answers)
    first = answers[0]
    is_bandwidth = size_bytes > LATENCY_BYTES * world_size
    algbw = size_bytes / median(times_s[SHM]) / 1e9 if is_bandwidth else None
    limit = speed_ratio(times_s, SHM, MEMCPY, scale=first["limit_scale"]) if MEMCPY in times_s else None
    return {
        "collective": collective,
        "world_size": world_size,
        "size_bytes": size_bytes,
        "calls_per_sample": first["calls"],
        "time_us": {side: median(samples) * 1e6 for side, samples in times_s.items()},
        "algbw_gb_s": algbw,
        "busbw_gb_s": algbw * first["bus_factor"] if algbw is not None else None,
        "touched_bytes": first["touched_bytes"] if MEMCPY in times_s else None,
        "memcpy_gb_s": first["copied_bytes"] / median(times_s[MEMCPY]) / 1e9 if MEMCPY in times_s else None,
        "ratio_to_gloo": ratio_json(speed_ratio(times_s, SHM, GLOO)),
        "ratio_to_limit": ratio_json(limit),
        "wrong": sum(answers[rank]["wrong"][SHM] for rank in answers),
        "wrong_gloo": sum(answers[rank]["wrong"][GLOO] for rank in answers),
        "samples_us": as_json(times_s),
    }


def comm_table(rows: Iterable[dict[str, Any]], world_size: int) -> TextTable:
    cores = cpus_usable()
    crowded = (
        ""
        if world_size <= cores
        else f" (more than the {cores} cores, bound to them in equal shares: latencies include scheduling)"
    )
    table = TextTable(
        title=f"{world_size} ranks, float32{crowded}",
        columns=(
            "collective", "size", "time us", "algbw GB/s", "busbw GB/s", "gloo us", "vs gloo", "of limit", "wrong"
        ),
    )  # fmt: skip
    for _, group in itertools.groupby(rows, key=lambda row: row["collective"]):
        table.sections.append([comm_cells(row) for row in group])
    return table


def comm_cells(row: dict[str, Any]) -> list[str]:
    ratios = [Ratio(**row[name]) if row[name] else None for name in ("ratio_to_gloo", "ratio_to_limit")]
    return [
        row["collective"],
        size_text(row["size_bytes"]) if row["size_bytes"] else "",
        f"{row['time_us'][SHM]:.1f}",
        *(f"{row[name]:.2f}" if row[name] is not None else "n/a" for name in ("algbw_gb_s", "busbw_gb_s")),
        f"{row['time_us'][GLOO]:.1f}",
        *(ratio_cell(ratio) for ratio in ratios),
        wrong_cell(row, GLOO) if row["collective"] != BARRIER else "n/a",
    ]


def wrong_cell(row: dict[str, Any], other: str) -> str:
    of_other = row[f"wrong_{other}"]
    return f"{row['wrong']}" + (f" ({other} {of_other})" if of_other else "")
