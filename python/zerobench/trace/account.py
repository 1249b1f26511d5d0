"""The account of a step: time busy, exposed and idle by lane and unit, and what computing waited for. Pure arithmetic
over intervals. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerobench.bench.rank.intervals import Interval, merged, subtracted
from zerobench.bench.rank.trace_file import COMPUTE, LANES, WAITS, Span, Trace, clipped

HOST = "host"
"""What computing waited for where no lane was busy: the host had not asked for anything yet."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """Time of a lane, or of a unit in it, in microseconds."""

    lane: str
    unit: str = ""
    operations: int
    busy_us: float
    exposed_us: float | None
    """Time in which it is busy and nothing computes. None: of computing itself."""
    idle_us: float


@dataclass(frozen=True, kw_only=True)
class Account:
    step_us: float
    busy_us: float
    idle_us: float
    lanes: list[Use]
    units: list[Use]
    waited_us: dict[str, float]
    """Time in which nothing computed, by the lane that ended it. It adds up with computing to the step."""


def account_of(trace: Trace) -> Account:
    """Return where the time of the traced step goes."""
    spans = [span for span in clipped(trace.spans, trace.step_us) if span.lane != WAITS]
    compute = _union(span for span in spans if span.lane == COMPUTE)
    by_lane: dict[str, list[Span]] = defaultdict(list)
    by_unit: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
        if span.unit:
            by_unit[span.lane, span.unit].append(span)
    busy_us = _length(_union(spans))

    def use(lane: str, unit: str, found: Sequence[Span]) -> Use:
        busy = _union(found)
        return Use(
            lane=lane,
            unit=unit,
            operations=len(found),
            busy_us=_length(busy),
            exposed_us=None if lane == COMPUTE else _length(subtracted(busy, compute)),
            idle_us=trace.step_us - _length(busy),
        )

    return Account(
        step_us=trace.step_us,
        busy_us=busy_us,
        idle_us=trace.step_us - busy_us,
        lanes=[use(lane, "", by_lane[lane]) for lane in LANES if lane in by_lane],
        units=[use(lane, unit, found) for (lane, unit), found in by_unit.items()],
        waited_us=waits(spans, compute, trace.step_us),
    )


def waits(spans: Iterable[Span], compute: Sequence[Interval], step_us: float) -> dict[str, float]:
    """Return the time in which nothing computed, by what was waited for. A gap waits for the operation that ends last
    in it, and before that began for the one that then ends last. What no such operation covers waits for the host."""
    others = sorted((span for span in spans if span.lane != COMPUTE), key=lambda span: span.end)
    ends = [span.end for span in others]
    found: dict[str, float] = defaultdict(float)
    for begin, end in subtracted([(0.0, step_us)] if step_us > 0 else [], compute):
        until = end
        for span in reversed(others[bisect_right(ends, begin) : bisect_right(ends, end)]):
            if span.begin >= until:
                continue
            last, first = min(span.end, until), max(span.begin, begin)
            found[HOST] += until - last
            found[span.lane] += last - first
            until = first
        found[HOST] += until - begin
    return dict(sorted(((lane, us) for lane, us in found.items() if us > 0), key=lambda item: -item[1]))


def _union(spans: Iterable[Span]) -> list[Interval]:
    return merged((span.begin, span.end) for span in spans)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
