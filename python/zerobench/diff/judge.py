"""Verdicts on a column of a row in two files: the ratio, its interval, and what the interval rests on.

Two files share no windows, so nothing within a file tells how far the machine drifted between them. Several runs show a
part of that; with one run each, an allowance for the drift widens the interval. docs/explain/telling-changes-apart.md
derives the allowances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerobench.diff.metrics import Metric, Repeats
from zerobench.results.schema import Row
from zerobench.results.stats import MEDIAN_EFFICIENCY, mad, median, median_error

ALLOWED_RUNS = 0.01
"""Share by which the medians of several runs may differ between two files though nothing changed."""
ALLOWED_IN_TURN = 0.03
"""The least that the same may be of one run of windows in turn."""
ALLOWED_BY_SPREAD = 2.0
"""The same by how far windows spread, since a machine whose windows scatter drifts as far between files. A multiple of
the root of both files' squared spreads (MAD as a share of the median)."""
ALLOWED_ALONE = 0.30
"""The same of a row that was measured at one moment of the machine."""
ALLOWED_BYTES = 0.01
"""The same of sizes."""

FEWEST_RUNS = 4
"""Of both files together: the spread of fewer says next to nothing of the runs to come."""
NORMAL_SIGMAS = 1.96
MOST_HALF_WIDTH = 5.0
"""Of a ratio's logarithm: an interval of a factor of 100 to either side is none."""
# Student's t for 95 %, by degrees of freedom from 2 on; the last one serves for all above it.
_STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)

SAME = "same within noise"
CANNOT_TELL = "cannot tell"
BUSY = "a busy machine"
ONE_VALUE = "one value each"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A column of one row."""

    value: float | None = None
    runs: Sequence[float] = ()
    """The figure of each run that the column follows."""
    times: Sequence[float] = ()
    """Samples of the step time, where the column follows it."""
    in_turn: bool = False
    is_busy: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence of how far a ratio may be off."""

    rests_on: str
    half_width: float | None = None
    """Of the 95 % interval of the ratio's logarithm."""
    knows_repeats: bool = False
    """Whether it covers what changes from one run to the next, so that "same" can be said."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdict on one column of one row."""

    old: float | None
    new: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rests_on: str
    verdict: str = CANNOT_TELL
    is_worse: bool = False
    is_better: bool = False


def measured(row: Row, flat: dict[str, Any], metric: Metric) -> Measured:
    """Return a column of an ok row. ``flat`` is the row as ``flat_row`` returns it."""
    value = _number(flat.get(metric.column))
    runs = [_number(getattr(run, metric.run_figure)) for run in row.runs or ()] if metric.run_figure else []
    known = [run for run in runs if run is not None and run > 0]
    follows_time = metric.repeats is Repeats.AS_TIMES
    if len(known) > 1 and metric.column in ("step_time_ms.median", metric.run_figure):
        value = median(known)  # as tables of several runs have it
    return Measured(
        value=value,
        runs=known if len(known) == len(runs) else (),
        times=row.step_time_ms.samples if follows_time and row.step_time_ms else (),
        in_turn=row.turns is not None and row.turns.how == "in turn",
        is_busy=row.busy is not None and follows_time,
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def judge(old: Measured, new: Measured, metric: Metric, *, margin: float) -> Judged:
    """Return the verdict. ``margin`` is the change that counts: rows are the same where a larger one is excluded."""
    found = evidence(old, new, metric)
    if old.value is None or new.value is None or old.value <= 0 or new.value <= 0:
        return Judged(old=old.value, new=new.value, rests_on=found.rests_on)
    ratio = new.value / old.value
    if found.half_width is None or found.half_width > MOST_HALF_WIDTH or not 0 < ratio < math.inf:
        return Judged(old=old.value, new=new.value, ratio=_number(ratio), rests_on=found.rests_on)
    factor = math.exp(found.half_width)
    low, high = ratio / factor, ratio * factor
    verdict, is_changed = CANNOT_TELL, low > 1 or high < 1
    if is_changed:
        verdict = metric.word(is_more=ratio > 1)
    elif found.knows_repeats and low >= 1 / (1 + margin) and high <= 1 + margin:
        verdict = SAME
    is_worse = is_changed and metric.better is not None and (ratio > 1) == (metric.better == "lower")
    return Judged(
        old=old.value, new=new.value, ratio=ratio, low=low, high=high, rests_on=found.rests_on, verdict=verdict,
        is_worse=is_worse, is_better=is_changed and metric.better is not None and not is_worse,
    )  # fmt: skip


def evidence(old: Measured, new: Measured, metric: Metric) -> Evidence:
    """Return how far the ratio may be off, by the runs if there are enough, else by windows and the allowances."""
    if old.is_busy or new.is_busy:
        return Evidence(rests_on=BUSY)
    allowed = ALLOWED_BYTES if metric.repeats is Repeats.AS_BYTES else ALLOWED_RUNS
    if len(old.runs) and len(new.runs) and len(old.runs) + len(new.runs) >= FEWEST_RUNS:
        half_width = math.hypot(runs_half_width(old.runs, new.runs), math.log1p(allowed))
        text = f"{len(old.runs)} and {len(new.runs)} runs"
        return Evidence(rests_on=text, half_width=half_width, knows_repeats=True)
    if metric.repeats is Repeats.AS_BYTES:
        return Evidence(rests_on="sizes", half_width=math.log1p(allowed), knows_repeats=True)
    if metric.repeats is not Repeats.AS_TIMES:
        return Evidence(rests_on=ONE_VALUE)
    errors = [_relative_error(side.times) for side in (old, new)]
    text = f"{len(old.times)} and {len(new.times)} {'windows' if old.in_turn and new.in_turn else 'steps'}"
    if any(error is None for error in errors):
        return Evidence(rests_on=text)
    allowed = _drift_in_turn(old.times, new.times) if old.in_turn and new.in_turn else ALLOWED_ALONE
    noise = NORMAL_SIGMAS * math.hypot(*(error or 0.0 for error in errors))
    return Evidence(rests_on=text, half_width=math.hypot(noise, math.log1p(allowed)))


def _drift_in_turn(old: Sequence[float], new: Sequence[float]) -> float:
    """Return the share by which one run of windows may differ from another though nothing changed."""
    return max(
        ALLOWED_IN_TURN, ALLOWED_BY_SPREAD * math.hypot(*(mad(side) / median(side) for side in (old, new)))
    )


def runs_half_width(old: Sequence[float], new: Sequence[float]) -> float:
    """Return half the 95 % interval of the logarithm of the ratio of the runs' medians: Student's, with the spread of
    runs pooled over both files."""
    logs = [[math.log(run) for run in runs] for runs in (old, new)]
    degrees = len(old) + len(new) - 2
    squares = math.fsum((value - math.fsum(runs) / len(runs)) ** 2 for runs in logs for value in runs)
    error = math.sqrt(squares / degrees * math.fsum(_median_variance(len(runs)) for runs in logs))
    return _STUDENT[min(degrees - 2, len(_STUDENT) - 1)] * error


def _median_variance(run_num: int) -> float:
    """Variance of the median of so many runs, over that of one. The median of two is their mean."""
    return (MEDIAN_EFFICIENCY**2 if run_num > 2 else 1.0) / run_num


def _relative_error(times: Sequence[float]) -> float | None:
    """Return the standard error of the median as a share of it, or None where too few samples tell it."""
    try:
        error, centre = median_error(times), median(times) if times else 0.0
        return error / centre if error is not None and centre > 0 else None
    except OverflowError:  # of times that no machine takes
        return None
