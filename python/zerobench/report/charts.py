"""Charts of any numeric column over a setting, as PNG and SVG, in the style of the plots."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench.report.plots import UNKNOWN_COLOURS
from zerobench.report.series import X_AXES, Chart, Line, charts_of
from zerobench.report.style import GRID, INK, MUTED, as_is, head, style_axes, subtitle
from zerobench.results.files import replace_file
from zerobench.results.merging import Merged
from zerobench.results.rows import labelled_setting, setting_text, setting_word
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import join_words, memory_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without yellow, which is faint as a line.
LINE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#555555", *UNKNOWN_COLOURS)
_MARKERS = "osD^vPX"
CHART_SUFFIXES = (".png", ".svg")
LINE_STYLES = ("-", "--", ":", "-.")
_WIDE_RANGE = 8  # values of x from which on, largest over smallest, the axis is logarithmic
_LONGEST_NAME = 150


def write_charts(
    merged: Sequence[Merged], folder: str | os.PathLike[str], *, metric: str, x: str, by: str
) -> list[Path]:
    """Draw a column over a setting into ``folder`` (made if missing), each chart as PNG and SVG; return their paths.

    ``merged``: as ``read_merged`` returns it. Raises ConfigError for an unknown column or setting, and OSError."""
    charts = charts_of(merged, metric=metric, x=x, by=by)
    looks = line_looks(charts)
    names: dict[str, None] = {}
    paths = []
    for chart in charts:
        name = next(name for name in _names(chart) if name not in names)
        names[name] = None
        paths += save(chart_figure(chart, looks), Path(folder), name)
    return paths


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG and return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}{suffix}" for suffix in CHART_SUFFIXES]
    for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
        write = partial(figure.savefig, format=path.suffix[1:], dpi=160, facecolor="white", metadata=metadata)
        replace_file(path, write)
    return paths


def _names(chart: Chart) -> Iterator[str]:
    """Return names for the file of a chart, the best first."""
    parts = [f"{chart.metric}_by_{chart.x}"]
    parts += [f"{setting_word(key)}-{setting_text(value)}" for key, value in chart.fixed.items()]
    name = file_name("_".join(parts))
    return (name if number == 1 else f"{name}_{number}" for number in count(1))


def file_name(text: str) -> str:
    """Return a text as part of a file's name."""
    return re.sub(r"[^\w.+-]+", "-", text)[:_LONGEST_NAME]


def line_looks(charts: Sequence[Chart]) -> dict[str, dict[str, Any]]:
    """Return how lines are drawn, by label: the same in all charts, a colour a value and dashes for a source."""
    lines = [line for chart in charts for line in chart.lines]
    values = list(dict.fromkeys(repr(line.value) for line in lines))
    sources = list(dict.fromkeys(line.source for line in lines))
    return {
        line.label: {
            "color": LINE_COLOURS[values.index(repr(line.value)) % len(LINE_COLOURS)],
            "marker": _MARKERS[values.index(repr(line.value)) % len(_MARKERS)],
            "linestyle": LINE_STYLES[sources.index(line.source) % len(LINE_STYLES)],
        }
        for line in lines
    }


def chart_figure(chart: Chart, looks: dict[str, dict[str, Any]]) -> Figure:
    """Return the drawn chart. ``looks``: as ``line_looks`` returns them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    style_axes(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    places = _set_x(axes, chart)
    unit, scale = _unit(chart)
    for line in chart.lines:
        _draw_line(axes, line, places, scale, looks[line.label])
    _mark_out_of_memory(axes, chart, places, looks)
    _set_y(axes, chart, unit, scale)
    fixed = [labelled_setting(key, value) for key, value in chart.fixed.items() if not _leads(key)]
    head(axes, f"{chart.metric} by {_x_word(chart)}", ", ".join([subtitle(chart.rows), *fixed]))
    figure.legend(
        loc="outside lower center", ncols=4, fontsize=8.5, frameon=False, labelcolor=INK, handlelength=2.2
    )
    return figure


def _leads(key: str) -> bool:
    """Return whether subtitles name a setting even if all rows share it."""
    return key in SETTINGS and SETTINGS[key].leads


def _x_word(chart: Chart) -> str:
    return setting_word(X_AXES[chart.x])


def _set_x(axes: Axes, chart: Chart) -> dict[str, float]:
    """Set up the horizontal axis; return the place of each value by its repr."""
    values = chart.x_values
    word = _x_word(chart)
    if chart.following:
        word += f" ({join_words([setting_word(key) for key in chart.following])} changes with it)"
    axes.set_xlabel(as_is(word))
    is_number = all(isinstance(value, int | float) for value in values)
    places = [float(value) if is_number else float(index) for index, value in enumerate(values)]
    if is_number and min(places) > 0 and max(places) >= _WIDE_RANGE * min(places):
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [as_is(setting_text(value)) for value in values])
    axes.minorticks_off()
    if len(values) == 1:
        axes.set_xlim(places[0] - 1, places[0] + 1)
    return {repr(value): place for value, place in zip(values, places, strict=True)}


def _unit(chart: Chart) -> tuple[str, int]:
    """Return the unit of a column of bytes and its size, or no unit."""
    if "bytes" not in chart.metric:
        return "", 1
    return memory_unit(int(point.y) for line in chart.lines for point in line.points)


def _draw_line(axes: Axes, line: Line, places: dict[str, float], scale: int, look: dict[str, Any]) -> None:
    if not line.points:
        return
    xs = [places[repr(point.x)] for point in line.points]
    ys = [point.y / scale for point in line.points]
    axes.plot(xs, ys, label=as_is(line.label), markersize=5.5, linewidth=1.5, **look)
    spreads = [(x, y, point.spread) for x, y, point in zip(xs, ys, line.points, strict=True) if point.spread]
    if spreads:
        below = [max(y - spread.low / scale, 0.0) for _, y, spread in spreads]
        above = [max(spread.high / scale - y, 0.0) for _, y, spread in spreads]
        axes.errorbar(
            [x for x, _, _ in spreads],
            [y for _, y, _ in spreads],
            yerr=[below, above],
            fmt="none",
            ecolor=look["color"],
            elinewidth=1,
            capsize=2.5,
        )


def _mark_out_of_memory(
    axes: Axes, chart: Chart, places: dict[str, float], looks: dict[str, dict[str, Any]]
) -> None:
    """Stack a cross at the bottom for each line that ran out of memory at a value of x."""
    cross: dict[str, Any] = {"marker": "x", "linestyle": "none", "markersize": 6}
    stacked: dict[str, int] = {}
    for line in chart.lines:
        for value in line.out_of_memory:
            level = stacked[repr(value)] = stacked.get(repr(value), 0) + 1
            axes.plot(
                [places[repr(value)]],
                [0.035 * level],
                transform=axes.get_xaxis_transform(),
                color=looks[line.label]["color"],
                **cross,
            )
    if stacked:
        axes.plot([], [], label="out of memory", color=MUTED, **cross)


def _set_y(axes: Axes, chart: Chart, unit: str, scale: int) -> None:
    """Begin at zero, so that small differences look small, and say what the whiskers are."""
    points = [point for line in chart.lines for point in line.points]
    ends = [point.y for point in points] + [point.spread.high for point in points if point.spread]
    low, high = min(point.y for point in points) / scale, max(ends) / scale
    if low >= 0:
        axes.set_ylim(0, 1.08 * high or 1.0)
    words = list(dict.fromkeys(point.spread.word for point in points if point.spread))
    label = f"{chart.metric}, {unit}" if unit else chart.metric
    axes.set_ylabel(as_is(f"{label} (whiskers: {join_words(words)})" if words else label))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 10 else f"{value:g}")
    axes.yaxis.label.set(color=INK, fontsize=9.5)
    axes.tick_params(axis="y", color=MUTED)
