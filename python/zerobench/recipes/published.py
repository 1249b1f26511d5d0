"""Published figures of a recipe's studies next to those of the rows that have the same settings."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from zerobench.recipes.references import Reference, read_references
from zerobench.results.rows import step_rate
from zerobench.results.schema import Results, Row
from zerobench.strategies.catalogue import OFFLOADS, Tool, tool_of

COLUMNS = (
    "study", "id", "model", "device", "figure", "unit", "published", "row", "ours", "ours_over_published", "consistent",
    "source", "note",
)  # fmt: skip
_WIDTH = 240
_SCALES = {"s": 1e-3, "ms": 1.0, "MB": 1e-6, "GB": 1e-9, "tokens/s": 1.0, "samples/s": 1.0, "%": 1.0}
"""Factor from the unit of a row's figure (ms, bytes) to that of a published one."""


def _std_over_runs(row: Row) -> float | None:
    spread = (row.over_runs or {}).get("tokens_per_s")
    return spread.std if spread is not None else None


def _of_a_gpu(row: Row) -> float | None:
    rate = step_rate(row)
    return rate / row.settings.world_size if rate is not None else None


def _times(name: str) -> Callable[[Row], float | None]:
    return lambda row: getattr(row.step_time_ms, name) if row.step_time_ms is not None else None


_FIGURES: dict[str, Callable[[Row], float | None]] = {
    "throughput": step_rate,
    "throughput, median": step_rate,
    "throughput, standard deviation": _std_over_runs,
    "throughput of a GPU": _of_a_gpu,
    "step time": _times("median"),
    "iteration time": _times("median"),
    "step time, mean": _times("mean"),
    "step time, standard deviation": _times("std"),
    "GPU memory": lambda row: row.peak_device_bytes,
    "peak GPU memory": lambda row: row.peak_device_bytes,
    "GPU utilisation": lambda row: row.device_utilisation_pct or row.device_busy_pct,
    "MFU": lambda row: row.mfu.pct if row.mfu is not None else None,
}
"""A row's figure by the published one's name."""


class Pair(NamedTuple):
    """A published figure, and a row's with the same settings where there is one."""

    reference: Reference
    row: Row | None
    ours: float | None

    @property
    def ratio(self) -> float | None:
        """Our figure over the published one."""
        published = self.reference.value
        return self.ours / published if self.ours is not None and published else None


def pairs_of(results: Results, studies: Sequence[str]) -> list[Pair]:
    """Return the figures of the studies, each with the rows that it can be held against."""
    found = []
    for reference in read_references():
        if reference.study in studies:
            rows = [row for row in results.rows if is_alike(row, reference)]
            found += [Pair(reference, row, figure_of(row, reference)) for row in rows]
            found += [] if rows else [Pair(reference, None, None)]
    return found


def is_alike(row: Row, reference: Reference) -> bool:
    """Return whether a row has the settings that the source states, and does nothing else that changes its figures."""
    settings = row.settings
    if row.status != "ok" or reference.model is None or reference.stage is None:
        return False
    if tool_of(row.strategy) not in (Tool.ZEROBENCH, Tool.DEEPSPEED):
        return False
    offload = reference.strategy if reference.strategy in OFFLOADS else "none"
    if (settings.offload, settings.compile, settings.grad_accum) != (offload, "none", 1):
        return False
    ranks = re.match(r"(\d+)x ", reference.device or "")
    stated = (
        (reference.stage, row.stage),
        (reference.model, settings.model),
        (reference.precision, settings.precision),
        (reference.batch, settings.batch_size),
        (reference.seq, settings.seq_length),
        (int(ranks[1]) if ranks else None, settings.world_size),
    )
    return all(theirs is None or theirs == ours for theirs, ours in stated)


def figure_of(row: Row, reference: Reference) -> float | None:
    """Return the row's figure in the unit of the published one."""
    figure = _FIGURES.get(reference.figure)
    scale = _SCALES.get(reference.unit)
    value = figure(row) if figure is not None else None
    if reference.unit == "samples/s" and value is not None:
        value /= row.settings.seq_length
    return None if value is None or scale is None else value * scale


def table_text(pairs: Iterable[Pair]) -> str:
    """Return the pairs as a table, one line a figure, however wide it is: half a name of a row is none."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("published row", "figure", "published", "ours", "ratio", "our row", "holds"):
        table.add_column(title, justify="right" if title in ("published", "ours", "ratio") else "left")
    for each in pairs:
        reference = each.reference
        table.add_row(
            reference.id,
            f"{reference.figure}, {reference.unit}" if reference.unit else reference.figure,
            _number(reference.value),
            _number(each.ours),
            _number(each.ratio),
            each.row.name if each.row is not None else "-",
            reference.consistent,
        )
    buffer = io.StringIO()
    Console(file=buffer, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def csv_text(pairs: Iterable[Pair]) -> str:
    """Return the pairs as CSV with the sources."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    for each in pairs:
        known = each.reference.model_dump(include=set(COLUMNS))
        writer.writerow(
            {
                **known,
                "published": each.reference.value,
                "row": each.row.name if each.row is not None else None,
                "ours": each.ours,
                "ours_over_published": each.ratio,
            }
        )
    return buffer.getvalue()
