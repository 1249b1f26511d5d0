"""`bench comm`: zerobench's shared-memory collectives beside gloo and memcpy, on ranks of this host.

The part that runs in the command imports no torch before its ranks start; the part that runs in ranks does.
"""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from rich.console import Console

from zerobench.bench.machine import cpus_usable, memory_available_bytes
from zerobench.bench.micro.output import (
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
from zerobench.bench.micro.ranks import Message, RankPlace, Ranks, bind_crowded_rank
from zerobench.bench.micro.sampling import (
    as_json,
    calls_per_sample,
    rotated,
    seconds_per_repeat,
    speed_ratio,
)
from zerobench.errors import ConfigError, Error
from zerobench.report.stats import Ratio, median

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LATENCY_BYTES = 8
MOST_TIMEOUT_S = 1_000_000
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
        for collective in self.collectives:
            if collective not in COLLECTIVES:
                raise ConfigError(
                    f"--collectives {collective!r} is unknown: choose from {', '.join(COLLECTIVES)}"
                )
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                f"--min-bytes {self.min_bytes} and --max-bytes {self.max_bytes} are no range: give 1 <= min <= max"
            )
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} measures nothing: give at least 1")
        if not 1 <= self.timeout_s <= MOST_TIMEOUT_S:
            raise ConfigError(
                f"--timeout {self.timeout_s:g} is not possible: give 1 to {MOST_TIMEOUT_S} seconds"
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
    cases = options.cases(world_size)
    target = partial(run_rank, cases=cases, options=options)
    answers: list[dict[int, Message]] = [{} for _ in cases]
    # The bar's thread starts after the ranks were forked.
    with Ranks(target, world_size=world_size, scratch=scratch) as ranks, new_progress(notes) as bar:
        task = bar.add_task(f"{world_size} ranks", total=len(cases) * (options.repeats + 1))
        for rank, message in ranks.messages():
            if "case" in message:
                answers[message["case"]][rank] = message
            else:
                bar.update(task, advance=1, description=f"{world_size} ranks: {message['doing']}")
    return [
        comm_row(collective, size, world_size, answer)
        for (collective, size), answer in zip(cases, answers, strict=True)
    ]


def comm_row(
    collective: str, size_bytes: int, world_size: int, answers: dict[int, Message]
) -> dict[str, Any]:
    """One line of the table, from what all ranks measured: a sample is the slowest rank's."""
    if len(answers) != world_size:
        raise Error(
            f"only {len(answers)} of {world_size} ranks measured {collective} of {size_text(size_bytes)}"
        )
    times_s = {
        side: [
            max(values) for values in zip(*(answers[rank]["times_s"][side] for rank in answers), strict=True)
        ]
        for side in answers[0]["times_s"]
    }
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


# What follows runs in the ranks.


def run_rank(
    place: RankPlace,
    send: Callable[[Message], None],
    *,
    cases: Sequence[tuple[str, int]],
    options: CommOptions,
) -> None:
    import torch
    import torch.distributed as dist

    from zerobench import _native
    from zerobench.meeting import expect_route

    core_num = cpus_usable()
    bind_crowded_rank(place)
    core = _native.load()
    torch.set_num_threads(max(1, core_num // place.world_size))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # Else gloo resolves the host's name, which laptops often cannot.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        expect_route("localhost", source="GLOO_SOCKET_IFNAME=lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(place.store_file, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=options.timeout_s),
    )
    comm = core.make_shm_communicator(
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        timeout_s=options.timeout_s,
    )
    for index, (collective, size_bytes) in enumerate(cases):
        message = measure_case(collective, size_bytes, comm, core, send, options.repeats, core_num=core_num)
        send({"case": index, **message})
    comm.barrier()
    dist.destroy_process_group()
    comm.close()


def measure_case(
    collective: str,
    size_bytes: int,
    comm: Any,
    core: Any,
    send: Callable[[Message], None],
    repeats: int,
    *,
    core_num: int,
) -> Message:
    from zerobench.bench.micro import collectives

    case = collectives.Case(collective=collective, size_bytes=size_bytes, world_size=comm.world_size)
    sides: dict[str, collectives.Side] = {
        SHM: collectives.ShmSide(case, comm),
        GLOO: collectives.GlooSide(case),
    }
    if size_bytes > LATENCY_BYTES * comm.world_size:
        sides[MEMCPY] = collectives.MemcpySide(case, core, comm, core_num=core_num)
    wrong = {SHM: 0, GLOO: 0}
    check(case, sides, comm, wrong)
    if collective == "all_reduce":  # in place: sums of zeros stay what they are however often they are summed
        for side in (sides[SHM], sides[GLOO]):
            side.source.zero_()
    calls = {name: agreed_calls(comm, side.repeat) for name, side in sides.items()}
    what = f"{collective} {size_text(size_bytes)}" if size_bytes else collective
    tick = {"doing": what}
    if comm.rank == 0:
        send(tick)
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    # Copies need no other rank: without an end in common, each would be timed as if alone.
    ends = {MEMCPY: comm.barrier}
    for index in range(repeats):
        for name in rotated(list(sides), index):
            sides[name].repeat(1)  # the side before has left its own buffers in the caches
            comm.barrier()
            times_s[name].append(seconds_per_repeat(sides[name].repeat, calls[name], end=ends.get(name)))
        if comm.rank == 0:
            send(tick)
    check(case, sides, comm, wrong)
    message: Message = {"times_s": times_s, "calls": calls, "wrong": wrong}
    if collective != BARRIER:
        message["bus_factor"] = collectives.bus_factor(collective, comm.world_size)
        message["touched_bytes"] = collectives.touched_bytes(case)
        copied = sides[MEMCPY].copied_bytes if MEMCPY in sides else message["touched_bytes"]
        message["copied_bytes"] = copied
        message["limit_scale"] = message["touched_bytes"] / copied
    else:
        message["bus_factor"] = message["limit_scale"] = 1.0
    return message


def check(case: Any, sides: dict[str, Any], comm: Any, wrong: dict[str, int]) -> None:
    """Add each side's wrong elements after one run on known values."""
    from zerobench.bench.micro import collectives

    if case.collective == BARRIER:
        return
    for name in (SHM, GLOO):
        comm.barrier()  # nobody reads these buffers any more
        collectives.fill(case, sides[name], comm.rank)
        comm.barrier()
        sides[name].repeat(1)
        wrong[name] += collectives.wrong_num(case, sides[name], comm.rank)
    comm.barrier()


def agreed_calls(comm: Any, repeat: Callable[[int], None]) -> int:
    """How many calls one sample takes: the same on all ranks, from the slowest one's best attempt."""
    repeat(1)
    comm.barrier()
    mine = min(seconds_per_repeat(repeat, 1) for _ in range(4))
    everyones = comm.exchange(struct.pack("d", mine))
    return calls_per_sample(max(struct.unpack(f"{comm.world_size}d", everyones)))
