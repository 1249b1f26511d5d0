"""Loss curves of all rows of a workload in one chart, with how far they are from the reference."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zerobench.errors import ConfigError
from zerobench.report.charts import LINE_COLOURS, LINE_STYLES, file_name, save
from zerobench.report.notes import trained
from zerobench.report.series import source_text
from zerobench.report.style import GRID, as_is, head, shortened, style_axes, subtitle
from zerobench.results.merging import Merged
from zerobench.results.rows import by_workload, flat_settings, row_labels, workload_heads
from zerobench.results.schema import Row
from zerobench.results.settings import SETTINGS
from zerobench.strategies.catalogue import FLOOR, REFERENCE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEGEND_COLUMNS = 4


class LargestDeviation(NamedTuple):
    """The loss that is furthest from the reference's at the same step."""

    reference: Row
    row: Row
    step: int
    """From 1, among the measured steps."""
    share: float
    """Share of the reference's loss."""


def write_loss_charts(
    merged: Sequence[Merged], folder: str | os.PathLike[str], *, by_precision: bool = False
) -> tuple[list[Path], list[str]]:
    """Draw the loss curves of each workload as PNG and SVG into ``folder`` (made if missing). ``by_precision``: one
    chart a strategy instead, with a curve for each precision.

    Returns the paths, and sentences that state the largest deviations. Raises ConfigError where no row has losses, and
    OSError."""
    sources = {
        id(row): source_text(found.sources) if len(merged) > 1 else ""
        for found in merged
        for row in found.results.rows
    }
    rows = [row for found in merged for row in found.results.rows if _has_curve(row)]
    if not rows:
        raise ConfigError(
            "no ok row has losses, so there is no curve to draw: `zerobench show` says why rows failed"
        )
    charts = _of_precisions(rows) if by_precision else by_workload(rows)
    firsts = [alike[0] for alike in charts]
    heads = row_labels(firsts) if by_precision else workload_heads(firsts)
    paths: list[Path] = []
    sentences: list[str] = []
    for alike, words in zip(charts, heads, strict=True):
        labels = _labels(alike, sources)
        told = deviation_text(alike, labels, [alike] if by_precision else _of_equal_tokens(alike))
        sentences.append(f"{words}: {told}" if words else told)
        stem = "loss_by_precision" if by_precision else "loss"
        name = file_name(f"{stem}_{words}") if words else stem
        if any(path.stem == name for path in paths):
            name = f"{name}_{len(paths)}"
        paths += save(loss_figure(alike, labels, told), Path(folder), name)
    return paths, sentences


def _has_curve(row: Row) -> bool:
    return row.status == "ok" and row.strategy != FLOOR and bool(row.loss)


def _labels(rows: Sequence[Row], sources: dict[int, str]) -> list[str]:
    """Return labels of rows, with where they are from if there are several machines or versions."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(sources[id(row)], []).append(row)
    labels: dict[int, str] = {}
    for source, found in by_source.items():
        for row, label in zip(found, row_labels(found), strict=True):
            labels[id(row)] = f"{label} ({source})" if source else label
    return [labels[id(row)] for row in rows]


def largest_deviation(rows: Sequence[Row]) -> LargestDeviation | None:
    """Return the largest deviation among rows that saw the same tokens, or None for a single row.

    The reference is the row of plain PyTorch on one rank if it is among them, else the first."""
    reference = next((row for row in rows if row.strategy == REFERENCE), rows[0])
    found = [
        LargestDeviation(reference, row, step, abs(loss - expected) / max(abs(expected), 1e-30))
        for row in rows
        if row is not reference
        for step, (loss, expected) in enumerate(zip(row.loss or [], reference.loss or [], strict=False), 1)
    ]
    return max(found, key=lambda each: each.share, default=None)


def _of_equal_tokens(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(trained(row), []).append(row)
    return list(groups.values())


def _of_precisions(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows in groups that differ in nothing but precision, the reference in front: fp32 where it is there."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        settings = {
            key: value
            for key, value in flat_settings(row).items()
            if key != "tf32" and not (key in SETTINGS and SETTINGS[key].known_after_run)
        }
        groups.setdefault(repr((row.strategy, sorted({**settings, "precision": ""}.items()))), []).append(row)
    return [sorted(group, key=lambda row: row.settings.precision != "fp32") for group in groups.values()]


def deviation_text(rows: Sequence[Row], labels: Sequence[str], groups: Sequence[Sequence[Row]]) -> str:
    """Return a sentence on the largest deviation within groups of rows that saw the same tokens."""
    names = {id(row): label for row, label in zip(rows, labels, strict=True)}
    found = [worst for group in groups if (worst := largest_deviation(group))]
    if not found:
        return "No two rows saw the same tokens, so losses are not compared."
    worst = max(found, key=lambda each: each.share)
    return (
        f"Largest deviation from a reference that saw the same tokens: {100 * worst.share:.2g} %, "
        f"{names[id(worst.row)]} from {names[id(worst.reference)]} at step {worst.step}."
    )


def loss_figure(rows: Sequence[Row], labels: Sequence[str], told: str) -> Figure:
    """Return the drawn curves of rows of one workload. ``told``: the sentence below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    legend_lines = math.ceil(len(rows) / _LEGEND_COLUMNS)
    figure = Figure(figsize=(8.0, 4.8 + 0.2 * legend_lines), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style_axes(axes)
    axes.grid(color=GRID, linewidth=0.8)
    for index, (row, label) in enumerate(zip(rows, shortened(labels), strict=True)):
        losses = row.loss or []
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            label=as_is(label),
            color=LINE_COLOURS[index % len(LINE_COLOURS)],
            linestyle=LINE_STYLES[index // len(LINE_COLOURS) % len(LINE_STYLES)],
            linewidth=1.4,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("measured step")
    axes.set_ylabel("loss, nats per token")
    head(axes, "Loss by step", subtitle(rows))
    figure.legend(
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        fontsize=8.5,
        frameon=False,
        title=as_is(textwrap.fill(told, 110)),
        title_fontproperties={"size": 8, "style": "italic"},
    )
    return figure
