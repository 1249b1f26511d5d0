"""A column of the comparison's table, and texts of cells that several columns share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerobench.results.schema import Row

ABSENT = "-"
ALWAYS = 100  # shown though empty
LAST = 99  # the same, until even folded names leave no room


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


def cells_of(rows: Sequence[Row | None], text: Callable[[Row], str | None]) -> list[str]:
    return [(text(row) if row is not None else None) or ABSENT for row in rows]


def decimals_for(values: Sequence[float]) -> int:
    smallest = min((value for value in values if value > 0), default=1.0)
    return 0 if smallest >= 1000 else 1 if smallest >= 10 else 2 if smallest >= 1 else 3


def bytes_cell(value: int | None, unit_bytes: int) -> str | None:
    return None if value is None else f"{value / unit_bytes:,.1f}"


def change_cell(change_pct: float | None) -> str | None:
    if change_pct is None:
        return None
    return f"{change_pct:+.0f} %" if abs(change_pct) >= 0.5 else "0 %"
