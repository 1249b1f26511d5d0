"""The comparison as a terminal table: what was measured first, then the rows, then what to know about them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zerobench.report.column import ABSENT, ALWAYS, LAST, Column
from zerobench.report.columns import table_columns
from zerobench.report.notes import note_lines
from zerobench.report.words import header_lines
from zerobench.results.rows import by_workload, fastest, is_ranked
from zerobench.results.schema import Results, Row

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

_FOLDED_WIDTH = 6  # below it names of rows are no names any more
_ASCII = str.maketrans({"±": "+-", "·": "|", "≠": "!=", "†": "*", "‡": "#"})
_STATUS_STYLES = {"ok": "green", "wrong": "bold red", "oom": "yellow", "failed": "red", "skipped": "dim"}


def render_table(results: Results) -> RenderableType:
    """A rich renderable that fits the width it is given, leaving out the least important columns. Where the last ones
    do not fit it is wider, since half a figure would be another one: print it with ``crop=False``."""
    return ComparisonTable(results)


def table_text(results: Results, *, width: int | None = None) -> str:
    """The table as plain text (120 columns unless told)."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width or 120,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,  # in a notebook rich would display the table instead of writing it
        legacy_windows=False,
    )
    console.print(render_table(results), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


class ComparisonTable:
    def __init__(self, results: Results) -> None:
        self.results = results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        def plain(text: str) -> str:
            return text.translate(_ASCII) if options.ascii_only else text

        for title, text in header_lines(self.results):
            yield _hanging(f"{title:<8}", plain(text))
        yield Text("")
        if not self.results.rows:
            yield Text("no rows yet")
            return
        columns = [
            column for column in table_columns(self.results.rows) if column.keep >= LAST or not column.empty()
        ]
        table, left_out = _fit(self.results.rows, columns, console, options, plain)
        yield table
        yield Text("")
        for text, style in note_lines(self.results, left_out):
            yield _hanging("", plain(text), style)


def _hanging(label: str, text: str, style: str = "") -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1) if label else 0)
    if label:
        grid.add_column(no_wrap=True, width=len(label))
    grid.add_column(overflow="fold")
    grid.add_row(*([Text(label, style="dim")] if label else []), Text(text, style=style))
    return grid


def _fit(
    rows: Sequence[Row],
    columns: list[Column],
    console: Console,
    options: ConsoleOptions,
    plain: Callable[[str], str],
) -> tuple[RenderableType, list[str]]:
    """The table with as many columns as fit, and the titles of the others."""
    from rich.measure import Measurement

    def whole_width(table: RenderableType) -> int:
        return Measurement.get(console, options.update(max_width=10_000), table).maximum

    def fits(table: RenderableType) -> bool:
        return whole_width(table) <= options.max_width

    left_out: list[str] = []
    while True:
        table = _build(rows, columns, plain)
        if fits(table):
            return table, left_out
        least = min(columns, key=lambda column: column.keep)
        if least.keep >= LAST:
            folded = _build(rows, columns, plain, folded=True)
            if fits(folded):
                return table, left_out
            if least.keep == ALWAYS:
                folded.width = whole_width(folded)
                return folded, left_out
        gone = [
            column for column in columns if column is least or (least.group and column.group == least.group)
        ]
        columns = [column for column in columns if column not in gone]
        left_out.append(least.group or f"{least.title} {least.unit}".strip())


def _build(
    rows: Sequence[Row], columns: Sequence[Column], plain: Callable[[str], str], *, folded: bool = False
) -> Table:
    """``folded``: names take their least width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    lines = [column.lines(plain) for column in columns]
    for column, (title, unit, *_) in zip(columns, lines, strict=True):
        may_fold = column.left and column.folds
        table.add_column(
            Text(f"{title}\n{unit}"),
            no_wrap=not may_fold,
            overflow="fold",
            min_width=_FOLDED_WIDTH if may_fold else None,
            max_width=_FOLDED_WIDTH if may_fold and folded else None,
        )
    leaders = {id(fastest(group)) for group in by_workload(rows)}
    for index, row in enumerate(rows):
        style = "bold" if id(row) in leaders and is_ranked(row) else ""
        cells = []
        for column, (_, _, *texts) in zip(columns, lines, strict=True):
            cell = Text(texts[index])
            if column.title == "status":
                cell.stylize(_STATUS_STYLES[row.status])
            elif column.cells[index] == ABSENT:
                cell.stylize("dim")
            cells.append(cell)
        table.add_row(*cells, style=style)
    return table
