"""Split a step's time by the intervals in which a device ran kernels and copies. Pure arithmetic: times are
numbers of any one unit. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Interval = tuple[float, float]  # begin, end


@dataclass(frozen=True, kw_only=True)
class Activity:
    """A kernel or copy that ran on the device."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Lap:
    """A stretch of the step that belongs to one phase."""

    phase: str
    begin: float
    end: float


OPTIMIZER = "optimizer"
EXPOSED = "exposed_communication"
EXPOSED_OFFLOAD = "exposed_offload"
EXPOSED_IO = "exposed_io"
HOST_BOUND = "host_bound"


# Kernels of the core (csrc/kernels/sum.cu, csrc/optim/adam.cu), whose names profilers show demangled.
_PEER_SUM = re.compile(r"\bzb::.*\bsum_kernel\b")
_UPDATE = re.compile(r"\bzb::.*\badam_kernel\b")


def is_communication(name: str) -> bool:
    """NCCL's kernels, copies between devices, and the sums of what these brought."""
    return "nccl" in name.lower() or name.startswith("Memcpy PtoP") or _PEER_SUM.search(name) is not None


def is_update(name: str) -> bool:
    """Our optimizer, which runs beside the next forward where state is sharded."""
    return _UPDATE.search(name) is not None


def is_transfer(name: str) -> bool:
    """Copies between host and device."""
    return name.startswith(("Memcpy HtoD", "Memcpy DtoH"))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as sorted intervals that neither touch nor overlap."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > begin:
            result.append((begin, end))
    return result


def subtracted(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return the parts of ``intervals`` outside ``holes``; both are as merged() returns them."""
    result: list[Interval] = []
    first = 0
    for begin, end in intervals:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > begin:
                result.append((begin, holes[at][0]))
            begin = max(begin, holes[at][1])
            at += 1
        if begin < end:
            result.append((begin, end))
    return result


def length_within(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """How much of [begin, end] the intervals cover; they do not overlap."""
    return sum(max(min(last, end) - max(first, begin), 0.0) for first, last in intervals)


def busy_share(activities: Iterable[Activity], begin: float, end: float) -> float:
    """How much of [begin, end] any of the activities ran in, from 0 to 1."""
    return length_within(merged((a.begin, a.end) for a in activities), begin, end) / (end - begin)


def part_for_files(phases: dict[str, float], files_ms: float | None) -> dict[str, float]:
    """Split waits for files from waits for offloaded state: they last at most as long as files blocked the host."""
    if files_ms is None or EXPOSED_OFFLOAD not in phases:
        return phases
    io_ms = min(files_ms, phases[EXPOSED_OFFLOAD])
    return phases | {EXPOSED_OFFLOAD: phases[EXPOSED_OFFLOAD] - io_ms, EXPOSED_IO: io_ms}


def split(activities: Sequence[Activity], laps: Sequence[Lap], *, offloads: bool = False) -> dict[str, float]:
    """Time by phase, and apart from the phases that it fell into: the time in which communication ran and nothing
    else did, and the time in which nothing ran at all, since the host had not yet asked for anything. All of it adds
    up to the laps. The time in which our update alone computed is the optimizer's, whatever lap it fell into.

    Where state is offloaded, copies between host and device are no computing: a stretch without kernels and
    collectives in which one ran was a wait for offloaded state, since the copy is what ends such a wait."""
    transfers = merged((a.begin, a.end) for a in activities if offloads and is_transfer(a.name))
    communication = merged((a.begin, a.end) for a in activities if is_communication(a.name))
    computing = [
        a for a in activities if not is_communication(a.name) and not (offloads and is_transfer(a.name))
    ]
    compute = merged((a.begin, a.end) for a in computing)
    updates_alone = subtracted(compute, merged((a.begin, a.end) for a in computing if not is_update(a.name)))
    exposed = subtracted(communication, compute)
    step = [(laps[0].begin, laps[-1].end)] if laps else []
    idle = subtracted(subtracted(step, compute), communication)
    waits = [gap for gap in idle if length_within(transfers, *gap) > 0]
    phases = {lap.phase: 0.0 for lap in laps} | {EXPOSED: 0.0, HOST_BOUND: 0.0}
    if offloads:
        phases[EXPOSED_OFFLOAD] = 0.0
    for lap in laps:
        busy = length_within(compute, lap.begin, lap.end)
        updating = length_within(updates_alone, lap.begin, lap.end)
        communicating = length_within(exposed, lap.begin, lap.end)
        waiting = length_within(waits, lap.begin, lap.end)
        phases[lap.phase] += busy - updating
        if updating > 0:
            phases[OPTIMIZER] = phases.get(OPTIMIZER, 0.0) + updating
        phases[EXPOSED] += communicating
        if offloads:
            phases[EXPOSED_OFFLOAD] += waiting
        phases[HOST_BOUND] += max(lap.end - lap.begin - busy - communicating - waiting, 0.0)
    return phases
