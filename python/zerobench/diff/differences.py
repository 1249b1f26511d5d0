"""Everything in which two result files differ, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerobench.diff.judge import CANNOT_TELL, SAME, Judged, judge, measured
from zerobench.diff.match import Matched, Pair, changed_by_run, changed_settings, match_rows
from zerobench.diff.metrics import DEFAULT_METRICS, Metric, metric_of
from zerobench.errors import DataError
from zerobench.report.frame import flat_rows
from zerobench.report.series import expect_numeric
from zerobench.results.merging import surroundings
from zerobench.results.schema import Results, Row


class Source(NamedTuple):
    """A result file."""

    path: str
    results: Results


class Fact(NamedTuple):
    """A fact of machine, versions or data that differs."""

    key: str
    old: Any
    new: Any


class StatusChange(NamedTuple):
    """A row that ended another way than before."""

    row: Row
    old: str
    error: str

    @property
    def is_broken(self) -> bool:
        """True if the row was right before and is not any more."""
        return self.old == "ok"


class OnlyOne(NamedTuple):
    """A row of one file alone."""

    row: Row
    reason: str
    """The settings in which the row of this name differs in the other file; empty where there is none."""


class JudgedRow(NamedTuple):
    """A row that is ok in both files, and the verdict on one column."""

    row: Row
    judged: Judged


@dataclass(frozen=True, kw_only=True)
class Table:
    """One column over all rows that are ok in both files, what changed first."""

    metric: Metric
    rows: list[JudgedRow]
    margin: float

    def regressions(self) -> list[JudgedRow]:
        """Return the rows that are worse by more than the margin."""
        return [each for each in self.rows if each.judged.is_worse and _change(each.judged) > self.margin]

    def counts(self) -> dict[str, int]:
        """Return how many rows have each verdict, in the order of the rows."""
        return dict(Counter(each.judged.verdict for each in self.rows))


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Two result files."""

    old: Source
    new: Source
    margin: float
    facts: list[Fact]
    run_changes: dict[str, int]
    """What runs tell and what differs, with the number of rows."""
    status_changes: list[StatusChange]
    vanished: list[OnlyOne]
    appeared: list[OnlyOne]
    tables: list[Table]
    ok_num: int
    """Rows that are ok in both files."""

    def is_regression(self) -> bool:
        """Return whether a row broke, or is worse by more than the margin."""
        has_broken = any(change.is_broken for change in self.status_changes)
        return has_broken or any(table.regressions() for table in self.tables)


def diff(old: Source, new: Source, *, columns: Sequence[str] = (), margin: float) -> Diff:
    """Return the differences between two result files, in ``columns`` or by default in step time and memory peak.

    ``margin`` is the share from which a worse row is a regression. Raises ConfigError for a column that has no number,
    DataError where no row is in both files."""
    matched = match_rows(old.results.rows, new.results.rows)
    if not matched.pairs:
        raise DataError(
            f"{old.path} and {new.path} have no row in common, so there is nothing to compare: give results of the "
            "same model, batch, ranks and strategies"
        )
    ok = [pair for pair in matched.pairs if pair.old.status == pair.new.status == "ok"]
    vanished, appeared = _only_one(matched)
    return Diff(
        old=old,
        new=new,
        margin=margin,
        facts=differing_facts(old.results, new.results),
        run_changes=dict(Counter(text for pair in matched.pairs if (text := changed_by_run(pair)))),
        status_changes=_status_changes(matched.pairs),
        vanished=vanished,
        appeared=appeared,
        tables=_tables(ok, _flats(old.results) | _flats(new.results), columns, margin),
        ok_num=len(ok),
    )


def _flats(results: Results) -> dict[int, dict[str, Any]]:
    """Return the columns of each row by the row's id."""
    flats = flat_rows(results.rows)
    return {id(row): flat for row, flat in zip(results.rows, flats, strict=True)}


def _tables(
    ok: Sequence[Pair], flats: dict[int, dict[str, Any]], columns: Sequence[str], margin: float
) -> list[Table]:
    """Return a table for each column. Raises ConfigError for a given one that has no number."""
    if ok:
        for column in columns:
            expect_numeric(column, [flats[id(row)] for pair in ok for row in pair])
    tables = []
    for metric in map(metric_of, dict.fromkeys(columns or DEFAULT_METRICS)):
        rows = []
        for pair in ok:
            before, after = (measured(row, flats[id(row)], metric) for row in pair)
            rows.append(JudgedRow(pair.new, judge(before, after, metric, margin=margin)))
        if any(each.judged.old is not None or each.judged.new is not None for each in rows):
            tables.append(Table(metric=metric, rows=sorted(rows, key=_urgency), margin=margin))
    return tables


def _status_changes(pairs: Sequence[Pair]) -> list[StatusChange]:
    """Return the rows that ended another way than before, broken ones first."""
    changes = [
        StatusChange(pair.new, pair.old.status, pair.new.error or "")
        for pair in pairs
        if pair.old.status != pair.new.status
    ]
    return sorted(changes, key=lambda change: not change.is_broken)


def _change(judged: Judged) -> float:
    return abs((judged.ratio or 1.0) - 1.0)


def _urgency(each: JudgedRow) -> tuple[int, float]:
    """Return a key that sorts what is worse first, then what else changed, then what cannot be told."""
    judged = each.judged
    if judged.is_worse or judged.is_better:
        return 0 if judged.is_worse else 2, -_change(judged)
    return {CANNOT_TELL: 3, SAME: 4}.get(judged.verdict, 1), -_change(judged)


def _only_one(matched: Matched) -> tuple[list[OnlyOne], list[OnlyOne]]:
    """Return the rows that vanished and those that appeared; of one name in both, the settings that differ."""
    old_by_name = {row.name: row for row in matched.vanished}
    new_by_name = {row.name: row for row in matched.appeared}

    def reason(name: str) -> str:
        both = name in old_by_name and name in new_by_name
        return changed_settings(old_by_name[name], new_by_name[name]) if both else ""

    return (
        [OnlyOne(row, reason(row.name)) for row in matched.vanished],
        [OnlyOne(row, reason(row.name)) for row in matched.appeared],
    )


def differing_facts(old: Results, new: Results) -> list[Fact]:
    """Return versions that differ, then facts of the machine, then the data."""
    before, after = surroundings(old), surroundings(new)
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    keys.sort(key=lambda key: not key.startswith("versions."))
    facts = [Fact(key.removeprefix("machine."), before.get(key), after.get(key)) for key in keys]
    if old.data_digest != new.data_digest:
        facts.append(Fact("data", old.data_digest, new.data_digest))
    return facts
