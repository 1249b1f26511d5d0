"""``--find``: the largest value of a setting at which a row fits, by tries in fresh processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zerobench.bench.assess import first_row
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.find import (
    at_value,
    bounds_of,
    is_strict,
    largest,
    next_value,
    too_large,
    value_in,
)
from zerobench.bench.schedule import Step
from zerobench.results.schema import Row, Search, Try
from zerobench.results.verdicts import is_within_limit


def step_at(step: Step, find: str, value: int) -> Step:
    """Return the step at another value of the searched setting, with a reference of its own."""
    configuration = at_value(step.configuration, find, value)
    group = replace(step.group, name=configuration.reference_group())
    return replace(step, configuration=configuration, group=group, ends_group=True)


def unfinished(configuration: Configuration, find: str, tries: Sequence[Try]) -> Row:
    """Return what is kept of a search that goes on: the row as it was asked for, with its tries so far."""
    row = first_row(configuration, status="skipped", error="the search for its largest setting is not over")
    row.search = search_of(find, tries)
    return row


def search_of(find: str, tries: Sequence[Try]) -> Search:
    """Return what the tries say together."""
    return Search(
        setting=find,
        largest=largest(tries),
        too_large=too_large(tries),
        try_num=len(tries),
        tries=list(tries),
    )


class RowSearch:
    """The search of one row.

    Tries train a few steps and verify nothing. The row then runs as every row does, with the largest value that
    fitted. Where it needs more memory so, whole rows take the place of tries of a few steps."""

    def __init__(
        self,
        step: Step,
        find: str,
        tries: Sequence[Try] = (),
        *,
        attempt: Callable[[Step, int], Try],
        measure: Callable[[Step], Row],
        keep: Callable[[Row], None],
    ) -> None:
        """``attempt`` tries a step at a value, ``measure`` runs it as an ordinary row, and ``keep`` gets the search
        after each try. ``tries``: those of an earlier comparison."""
        self._step, self._find, self._tries = step, find, list(tries)
        self._attempt, self._measure, self._keep = attempt, measure, keep
        self._rows: dict[int, Row] = {}

    def run(self) -> tuple[Step, Row]:
        """Return the step at the largest value that fits, and its row; at the least value where none fits."""
        while True:
            while (value := self._next()) is not None:
                self._try(value)
            value = largest(self._tries)
            if value is None:
                value = self._tries[-1].value
                row = self._row_without_fit(self._tries[-1])
                break
            row = self._rows.get(value) or self._measure(self._at(value))
            if row.status != "oom" and is_within_limit(row.peak_device_bytes, row.settings):
                break
            self._add(whole_try(value, row))
        row.search = search_of(self._find, self._tries)
        return self._at(value), row

    def _next(self) -> int | None:
        configuration = self._step.configuration
        start, bounds = value_in(self._find, configuration.settings), bounds_of(configuration, self._find)
        return next_value(self._tries, start=start, bounds=bounds)

    def _at(self, value: int) -> Step:
        return step_at(self._step, self._find, value)

    def _try(self, value: int) -> None:
        if not is_strict(self._tries):
            self._add(self._attempt(self._at(value), value))
            return
        self._rows[value] = self._measure(self._at(value))
        self._add(whole_try(value, self._rows[value]))

    def _add(self, one: Try) -> None:
        self._tries.append(one)
        self._keep(unfinished(self._step.configuration, self._find, self._tries))

    def _row_without_fit(self, last: Try) -> Row:
        if last.value in self._rows:
            return self._rows[last.value]
        if last.status == "ok":  # above --memory-limit, so it has figures
            return self._measure(self._at(last.value))
        configuration = self._at(last.value).configuration
        return first_row(configuration, status=last.status, error=last.error, oom_tier=last.oom_tier)


def whole_try(value: int, row: Row) -> Try:
    """Return an ordinary row as a try."""
    return Try(
        value=value,
        status=row.status,
        fits=row.status == "ok" and is_within_limit(row.peak_device_bytes, row.settings),
        peak_device_bytes=row.peak_device_bytes,
        error=row.error,
        oom_tier=row.oom_tier,
        whole=True,
        duration_s=row.duration_s,
    )
