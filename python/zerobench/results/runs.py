"""Figures of a row over its runs: each run is in fresh processes, so runs differ more than the steps of one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev

from zerobench.results.schema import Row, Run, Spread
from zerobench.results.stats import median

FIGURES = tuple(Run.model_fields)
"""Figures of a run, whose median and standard deviation over runs a row carries."""


def add_run(row: Row, run: Run) -> None:
    """Append a run, and compute the spreads anew."""
    set_runs(row, [*(row.runs or []), run])


def set_runs(row: Row, runs: Sequence[Run]) -> None:
    """Give the row its runs and, from two runs on, their spreads."""
    row.runs = list(runs)
    row.over_runs = over_runs(runs) if len(runs) > 1 else None


def over_runs(runs: Sequence[Run]) -> dict[str, Spread]:
    """Return the median and the standard deviation of each figure that every run has."""
    found = {}
    for name in FIGURES:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        if len(values) == len(runs):
            found[name] = Spread(median=median(values), std=stdev(values))
    return found
