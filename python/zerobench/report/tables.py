"""The comparison as a terminal table: what was measured first, then the rows, then what to know about them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerobench.bench.result import Results, Row

from .rows import (
    FLOOR,
    by_workload,
    checksum_marks,
    dtype_text,
    fastest,
    flat_settings,
    is_ranked,
    row_labels,
    setting_text,
    setting_word,
    varying_settings,
)
from .words import header_lines, memory_unit, note_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

ABSENT = "-"
_ASCII = str.maketrans({"±": "+-", "·": "|", "≠": "!=", "†": "*"})
_STATUS_STYLES = {"ok": "green", "wrong": "bold red", "oom": "yellow", "failed": "red", "skipped": "dim"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: two header rows (what, unit), a cell per row, and when it goes. Lower `keep` goes first."""

    title: str
    unit: str
    cells: list[str]
    keep: int
    group: str = ""  # columns that come and go together
    left: bool = False
    folds: bool = True  # text that may break where even the last columns do not fit

    def lines(self, plain: Callable[[str], str]) -> list[str]:
        """Header rows and cells, numbers aligned right (rich strips the blanks that stand for a missing ± part)."""
        texts = [plain(text) for text in (self.title, self.unit, *self.cells)]
        width = 0 if self.left else max(len(text) for text in texts)
        return [text.rjust(width) for text in texts]

    def empty(self) -> bool:
        return all(cell == ABSENT for cell in self.cells)


ALWAYS = 100


def render_table(results: Results) -> RenderableType:
    """A rich renderable that fits the width it is given, leaving out the least important columns."""
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
    console.print(render_table(results))
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
            column for column in _columns(self.results.rows) if column.keep == ALWAYS or not column.empty()
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

    left_out: list[str] = []
    while True:
        table = _build(rows, columns, plain)
        if Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width:
            return table, left_out
        droppable = [column for column in columns if column.keep < ALWAYS]
        if not droppable:
            return table, left_out
        least = min(droppable, key=lambda column: column.keep)
        gone = [
            column for column in columns if column is least or (least.group and column.group == least.group)
        ]
        columns = [column for column in columns if column not in gone]
        left_out.append(least.group or f"{least.title} {least.unit}")


def _build(rows: Sequence[Row], columns: Sequence[Column], plain: Callable[[str], str]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, header_style="bold")
    lines = [column.lines(plain) for column in columns]
    for column, (title, unit, *_) in zip(columns, lines, strict=True):
        table.add_column(
            Text(f"{title}\n{unit}"), no_wrap=not (column.left and column.folds), overflow="fold"
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


def _columns(rows: Sequence[Row]) -> list[Column]:
    # Right before fast: no speed and no memory is printed for a row whose parameters are wrong.
    shown = [row if row.status == "ok" else None for row in rows]
    base = _baseline_word(rows)
    unit, unit_bytes = memory_unit(row.peak_device_bytes for row in shown if row is not None)
    columns = [
        *_name_columns(rows),
        Column(title="status", unit="", cells=[row.status for row in rows], keep=ALWAYS, left=True),
        Column(title="step", unit="ms ± MAD", cells=_step_cells(shown), keep=ALWAYS),
        Column(title="tokens", unit="per s", cells=_cells(shown, _tokens_cell), keep=80),
        Column(title="relative", unit="1 = fastest", cells=_cells(shown, _relative_cell), keep=90),
        Column(title="of", unit=FLOOR, cells=_cells(shown, _floor_cell), keep=85),
        Column(title="MFU", unit="%", cells=_cells(shown, _mfu_cell), keep=65),
        Column(title="speedup", unit=f"vs {base}", cells=_cells(shown, _speedup_cell), keep=50),
        Column(
            title="peak",
            unit=unit,
            cells=_cells(shown, lambda row: _bytes_cell(row.peak_device_bytes, unit_bytes)),
            keep=ALWAYS,
        ),
        Column(title="memory", unit=f"vs {base}", cells=_cells(shown, _change_cell), keep=60),
        Column(title="power", unit="W/GPU", cells=_cells(shown, _power_cell), keep=25),
        Column(title="graphs", unit="a step", cells=_cells(shown, _graphs_cell), keep=40),
        Column(title="update", unit="deviation", cells=_deviation_cells(rows), keep=70),
        Column(title="dtypes", unit="p/c/r/m/s", cells=_dtype_cells(rows), keep=30, left=True),
    ]
    return columns + _phase_columns(shown)


def _name_columns(rows: Sequence[Row]) -> list[Column]:
    """The strategy and the settings in which rows differ; or the rows' names, where those do not tell rows apart."""
    labels = row_labels(rows)
    if labels == [row.name for row in rows]:
        return [Column(title="row", unit="", cells=labels, keep=ALWAYS, left=True)]
    columns = [
        Column(title="strategy", unit="", cells=[row.strategy for row in rows], keep=ALWAYS, left=True)
    ]
    for key in varying_settings(rows)[0]:
        cells = [setting_text(flat_settings(row).get(key)) for row in rows]
        numeric = all(cell.replace(".", "", 1).isdigit() for cell in cells)
        columns.append(
            Column(title=setting_word(key), unit="", cells=cells, keep=ALWAYS, left=not numeric, folds=False)
        )
    return columns


def _cells(rows: Sequence[Row | None], text: Callable[[Row], str | None]) -> list[str]:
    return [(text(row) if row is not None else None) or ABSENT for row in rows]


def _decimals(values: Sequence[float]) -> int:
    smallest = min((value for value in values if value > 0), default=1.0)
    return 0 if smallest >= 1000 else 1 if smallest >= 10 else 2 if smallest >= 1 else 3


def _step_cells(rows: Sequence[Row | None]) -> list[str]:
    times = [row.step_time_ms if row is not None else None for row in rows]
    decimals = _decimals([time.median for time in times if time is not None])
    spread = max((len(f"{time.mad:.{decimals}f}") for time in times if time is not None), default=0)
    return [
        ABSENT if time is None else f"{time.median:.{decimals}f} ± {time.mad:>{spread}.{decimals}f}"
        for time in times
    ]


def _tokens_cell(row: Row) -> str | None:
    if row.tokens_per_s is None:
        return None
    decimals = 0 if row.tokens_per_s >= 100 else 1
    return f"{row.tokens_per_s:,.{decimals}f}" + ("" if row.comparable else " †")


def _relative_cell(row: Row) -> str | None:
    if row.relative is None:
        return None
    spread = row.relative_uncertainty
    return f"{row.relative:.2f}" + (f" ± {spread:.2f}" if spread is not None else "       ")


def _speedup_cell(row: Row) -> str | None:
    return None if row.speedup is None else f"{row.speedup:.2f}x"


def _change_cell(row: Row) -> str | None:
    if row.memory_change_pct is None:
        return None
    return f"{row.memory_change_pct:+.0f} %" if abs(row.memory_change_pct) >= 0.5 else "0 %"


def _floor_cell(row: Row) -> str | None:
    return None if row.of_compute_only is None else f"{100 * row.of_compute_only:.1f} %"


def _mfu_cell(row: Row) -> str | None:
    return None if row.mfu is None else f"{row.mfu.pct:.1f}"


def _power_cell(row: Row) -> str | None:
    return None if row.sampled is None or row.sampled.power_w is None else f"{row.sampled.power_w:.0f}"


def _graphs_cell(row: Row) -> str | None:
    return None if row.compiled_graphs is None else f"{row.compiled_graphs:g}"


def _bytes_cell(value: int | None, unit_bytes: int) -> str | None:
    return None if value is None else f"{value / unit_bytes:,.1f}"


def _baseline_word(rows: Sequence[Row]) -> str:
    names = {row.baseline for row in rows if row.baseline}
    words = {row.strategy for row in rows if row.name in names}
    return words.pop() if len(words) == 1 else "baseline"


def _deviation_cells(rows: Sequence[Row]) -> list[str]:
    marks = checksum_marks(rows)
    pad = any(marks)
    cells = []
    for row, mark in zip(rows, marks, strict=True):
        update = row.deviation.update if row.deviation else None
        if update is None and not mark:
            cells.append(ABSENT)
            continue
        number = ABSENT if update is None else "0" if update == 0 else f"{update:.1e}"
        cells.append(f"{number} {mark or ' '}" if pad else number)
    return cells


def _dtype_cells(rows: Sequence[Row]) -> list[str]:
    texts = [dtype_text(row) for row in rows]
    if len({text for text in texts if text}) < 2:
        return [ABSENT] * len(rows)
    return [text or ABSENT for text in texts]


PHASE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optim.",
    "exposed_communication": "comm.",
    "host_bound": "host",
    "exposed_offload": "offload",
    "exposed_io": "I/O",
}


def _phase_columns(rows: Sequence[Row | None]) -> list[Column]:
    phases = dict.fromkeys(phase for row in rows if row is not None for phase in row.phases_ms or {})
    ordered = sorted(
        phases, key=lambda phase: (list(PHASE_WORDS).index(phase) if phase in PHASE_WORDS else 99, phase)
    )
    values = [value for row in rows if row is not None for value in (row.phases_ms or {}).values()]
    decimals = min(1, _decimals(values))
    columns = []
    for phase in ordered:
        cells = [
            ABSENT
            if row is None or row.phases_ms is None or phase not in row.phases_ms
            else f"{row.phases_ms[phase]:.{decimals}f}"
            for row in rows
        ]
        word = PHASE_WORDS.get(phase, phase.replace("_", " "))
        columns.append(Column(title=word, unit="ms", cells=cells, keep=20, group="phases"))
    return columns
