"""Goals of advice: what makes one row better than another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerobench.results.rows import fastest, has_peak, is_ranked, step_rate, tokens_per_step
from zerobench.results.schema import Row
from zerobench.results.sizes import bytes_text, count_text, ms_text, rate_text

DEFAULT_GOAL = "throughput"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal, and the order that it puts rows in."""

    name: str
    what: str
    """What the best row has, after "the"."""
    order: Callable[[Sequence[Row]], list[Row]]
    """Return ranked rows, the best first, without those that lack the figure."""
    figure: Callable[[Row], str]
    across_workloads: bool = False
    """Whether rows of all workloads are ranked together."""


def _by_throughput(rows: Sequence[Row]) -> list[Row]:
    best = fastest(rows)
    return sorted(rows, key=lambda row: (row is not best, -_rate(row), row.name))


def _by_step_time(rows: Sequence[Row]) -> list[Row]:
    """Order by the time of a step. Among rows with as many tokens in a step, the fastest one comes first."""
    works = {tokens_per_step(row) for row in rows}
    leaders = [fastest([row for row in rows if tokens_per_step(row) == work]) for work in works]
    best = min(filter(None, leaders), key=lambda row: (_step_ms(row), row.name), default=None)
    return sorted(rows, key=lambda row: (row is not best, _step_ms(row), row.name))


def _by_memory(rows: Sequence[Row]) -> list[Row]:
    known = [row for row in rows if has_peak(row)]
    return sorted(known, key=lambda row: (row.peak_device_bytes, -_rate(row), row.name))


def _by_size(rows: Sequence[Row]) -> list[Row]:
    """Order by parameters, then by the tokens of a micro-batch, then by speed."""
    return sorted(
        rows,
        key=lambda row: (
            -(row.settings.parameter_count or 0),
            -_micro_batch_tokens(row),
            -_rate(row),
            row.name,
        ),
    )


def _by_energy(rows: Sequence[Row]) -> list[Row]:
    known = [row for row in rows if row.tokens_per_j is not None]
    return sorted(known, key=lambda row: (-(row.tokens_per_j or 0.0), row.name))


def _rate(row: Row) -> float:
    return step_rate(row) or 0.0


def _step_ms(row: Row) -> float:
    assert row.step_time_ms is not None
    return row.step_time_ms.median


def _micro_batch_tokens(row: Row) -> int:
    return row.settings.batch_size * row.settings.seq_length


def _size_text(row: Row) -> str:
    count = row.settings.parameter_count
    parameters = f"{count_text(count)} parameters, " if count else ""
    return f"{parameters}{row.settings.batch_size} x {row.settings.seq_length} tokens a micro-batch"


GOALS = {
    goal.name: goal
    for goal in (
        Goal(
            name="throughput",
            what="most tokens a second",
            order=_by_throughput,
            figure=lambda row: f"{rate_text(_rate(row))} tokens/s",
        ),
        Goal(
            name="step-time",
            what="least time of an optimizer step",
            order=_by_step_time,
            figure=lambda row: f"{ms_text(_step_ms(row))} for {tokens_per_step(row):,} tokens",
        ),
        Goal(
            name="memory",
            what="lowest peak of device memory",
            order=_by_memory,
            figure=lambda row: f"{bytes_text(row.peak_device_bytes or 0)} peak",
        ),
        Goal(
            name="largest",
            what="largest model that fits, then the most tokens in a micro-batch",
            order=_by_size,
            figure=_size_text,
            across_workloads=True,
        ),
        Goal(
            name="energy",
            what="most tokens a joule",
            order=_by_energy,
            figure=lambda row: f"{row.tokens_per_j or 0.0:.2f} tokens/J",
        ),
    )
}
"""Goals by name, in the order of ``--help``."""


def best_first(rows: Sequence[Row], goal: Goal) -> list[Row]:
    """Return the rows that are right, comparable and undisturbed and have the goal's figure, the best first."""
    return goal.order([row for row in rows if is_ranked(row)])


def advised_row(rows: Sequence[Row], goal: Goal = GOALS[DEFAULT_GOAL]) -> Row | None:
    """Return the row to take for a goal, or None where no row may be recommended."""
    return next(iter(best_first(rows, goal)), None)
