"""Contents of the page for one result file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerobench.page.chart import Chart
from zerobench.page.grid_charts import grid_charts, scaling_charts
from zerobench.page.row_charts import course_charts, row_charts
from zerobench.report.advice.advise import advise
from zerobench.report.columns import ABSENT, Column, table_columns
from zerobench.report.frame import flat_row
from zerobench.report.notes import note_lines
from zerobench.report.words import header_lines
from zerobench.results.rows import flat_settings, row_labels, setting_text
from zerobench.results.schema import Results, Row

_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True)
class Cell:
    text: str
    sort: str = ""  # a number, if the cell begins with one
    right: bool = False  # in a column with numbers


@dataclass(frozen=True)
class Table:
    heads: list[tuple[str, str]]  # title and unit
    lines: list[list[Cell]]


@dataclass(frozen=True)
class Group:
    """Charts below one heading; without any, the heading says that there are none."""

    title: str
    charts: list[Chart]
    missing: str = "These rows have no figures for it."


@dataclass(frozen=True)
class RowDetails:
    label: str
    name: str
    status: str
    rerun: str
    error: str
    settings: list[tuple[str, str]]
    figures: list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    title: str
    results: Results
    machine: str
    counts: str
    advice: list[str]
    notes: list[str]
    facts: list[tuple[str, str]]
    table: Table
    groups: list[Group] = field(default_factory=list)
    rows: list[RowDetails] = field(default_factory=list)


def section_of(title: str, results: Results) -> Section:
    """Return all that the page shows of the file called ``title``."""
    rows = results.rows
    return Section(
        title=title,
        results=results,
        machine=json.dumps(results.machine, indent=1, ensure_ascii=False),
        counts=_counts_text(rows),
        advice=advise(results),
        notes=[text for text, _ in note_lines(results, [])],
        facts=header_lines(results),
        table=_table(table_columns(rows) if rows else []),
        groups=_groups(rows),
        rows=[_details(label, row) for label, row in zip(row_labels(rows), rows, strict=True)],
    )


def _counts_text(rows: Sequence[Row]) -> str:
    """Such as "12 rows: 10 ok, 2 oom"."""
    counts = Counter(row.status for row in rows)
    words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}{': ' if words else ''}{words}"


def _groups(rows: Sequence[Row]) -> list[Group]:
    """Every chart below the heading that it belongs to."""
    return [
        Group("Time, memory and speed", row_charts(rows)),
        Group(
            "Over what the grid varies", grid_charts(rows), "No strategy was measured with several settings."
        ),
        Group("Scaling", scaling_charts(rows), "No strategy was measured with several numbers of ranks."),
        Group("Loss, samples, power and energy", course_charts(rows)),
    ]


def _table(columns: Sequence[Column]) -> Table:
    """Every column that has a cell, without the blanks that align them in a terminal."""
    kept = [column for column in columns if not column.empty()]
    cells = [_cells(column) for column in kept]
    return Table(
        [(column.title, column.unit) for column in kept], [list(line) for line in zip(*cells, strict=True)]
    )


def _cells(column: Column) -> list[Cell]:
    texts = [" ".join(text.split()) for text in column.cells]
    found = [None if text == ABSENT else _NUMBER.match(text) for text in texts]
    numbers = [match.group().replace(",", "") if match else "" for match in found]
    right = any(numbers) and not column.left
    return [Cell(text, number, right) for text, number in zip(texts, numbers, strict=True)]


def _details(label: str, row: Row) -> RowDetails:
    flat = flat_row(row)
    figures = {key: value for key, value in flat.items() if not key.startswith("settings.")}
    return RowDetails(
        label=label,
        name=row.name,
        status=row.status,
        rerun=row.rerun or "",
        error=row.error or "",
        settings=[(key, setting_text(value)) for key, value in flat_settings(row).items()],
        figures=[(key, _text(value)) for key, value in figures.items() if value is not None],
    )


def _text(value: Any) -> str:
    """A figure as it stands in the file; of long lists how many there are."""
    if isinstance(value, list):
        return f"{len(value)} values" if len(value) > 8 else ", ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
