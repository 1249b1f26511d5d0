"""`bench comm`: zerobench's shared-memory collectives beside gloo and memcpy, on ranks of this host.

This part runs in the command, which imports no torch before its ranks start; comm_ranks.py runs in the ranks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from zerobench.engine.config import MAX_TIMEOUT_S
from zerobench.errors import ConfigError, Error
from zerobench.host.machine import cpus_usable, memory_available_bytes
from zerobench.micro.checks import check_known, check_repeats
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

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LATENCY_BYTES = 8
BARRIER = "barrier"
SHM, GLOO, MEMCPY = "shm", "gloo", "memcpy"
# Both sides' buffers, the copy's and the temporaries of the check, per rank, over the size.
_RANK_MEMORY_FACTOR = 9


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """What to measure. Each size is four times the one before it."""

    world_sizes: Sequence[int]
    collectives: Sequence[str]
    min_bytes: int
    max_bytes: int
    repeats: int
    timeout_s: float

    def check(self) -> None:
        self.check_values()
        needed = max(self.world_sizes) * self.max_bytes * _RANK_MEMORY_FACTOR
        if needed > memory_available_bytes():
            raise ConfigError(
                f"--max-bytes {self.max_bytes} on {max(self.world_sizes)} ranks needs about {size_text(needed)}, and "
                f"{size_text(memory_available_bytes())} are available: give a smaller size"
            )

    def check_values(self) -> None:
        for world_size in self.world_sizes:
            if not 2 <= world_size <= 64:
                raise ConfigError(
                    f"--world-size {world_size} is not possible: collectives need 2 to 64 ranks"
                )
        check_known("--collectives", self.collectives, COLLECTIVES)
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                f"--min-bytes {self.min_bytes} and --max-bytes {self.max_bytes} are no range: give 1 <= min <= max"
            )
        check_repeats(self.repeats)
        if not 1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"--timeout {self.timeout_s:g} is not possible: give 1 to {MAX_TIMEOUT_S:.0f} seconds"
            )

    def sizes(self) -> list[int]:
        sizes = [self.min_bytes]
        while sizes[-1] * 4 <= self.max_bytes:
            sizes.append(sizes[-1] * 4)
        return sizes

    def cases(self, world_size: int) -> list[tuple[str, int]]:
        """(collective, size in bytes), latencies first. Sizes are rounded up to whole floats on every rank."""
        line = 4 * world_size
        sizes = [-(-size // line) * line for size in (LATENCY_BYTES, *self.sizes())]
        return [(BARRIER, 0), *itertools.product(self.collectives, dict.fromkeys(sizes))]


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
    from zerobench.micro.comm_ranks import run_rank

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
    """What ranks that run ``target`` say about each case, by rank; a bar says how far ``who`` are."""
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
