"""Three PNG plots of a result: step time by phase, memory by category, speed against memory.

Drawn with matplotlib's object API and the Agg canvas, so no global state and no display are touched. A value that is
not there is absent from a plot, never zero. Rows that are not ok have no bar and say why instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench.report.scatter import speed_memory_figure
from zerobench.report.style import GRID, INK, MUTED, as_is, head, shortened, style_axes, subtitle
from zerobench.results.files import replace_file
from zerobench.results.rows import row_labels
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import memory_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any kind of colour vision. One colour per meaning in every plot.
PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "exposed_communication": "#E69F00",
    "exposed_offload": "#CC79A7",
    "exposed_io": "#D55E00",
    "host_bound": "#B0B0B0",
}
CATEGORY_COLOURS = {
    "parameters": "#0072B2",
    "gather_slots": "#56B4E9",
    "gradients": "#E69F00",
    "gradient_slots": "#F0E442",
    "master": "#009E73",
    "exp_avg": "#D55E00",
    "exp_avg_sq": "#CC79A7",
    "staging": "#555555",
    "communicators": "#117733",
}
REST = "activations and all else"
NOT_SPLIT = "phases not measured"
# What a profiler that delays the host makes longer on a GPU, also where other ranks wait for that host. First the one
# that is an upper bound anyway.
WAITS = ("host_bound", "exposed_communication")
_VISIBLE_SHARE = 0.002  # of the longest bar: what is less everywhere has no place in the legend
REST_COLOUR = "#d0d0d0"
UNKNOWN_COLOURS = ("#882255", "#999933", "#332288", "#44AA99", "#AA4499", "#661100")
TIERS = {"device": "device memory", "host": "host memory", "nvme": "NVMe"}
TIER_ORDER = tuple(TIERS)

Segment = tuple[str, float]  # category and length


def write_plots(results: Results, folder: str | os.PathLike[str]) -> list[Path]:
    """PNG files in `folder` (made if missing): those for which any row has values. Returns their paths. Raises
    OSError."""
    drawn: list[tuple[str, Figure | None]] = [
        ("step_time.png", step_time_figure(results)),
        ("memory.png", memory_figure(results)),
        ("speed_memory.png", speed_memory_figure(results)),
    ]
    target = Path(folder)
    paths = []
    for name, figure in drawn:
        if figure is not None:
            target.mkdir(parents=True, exist_ok=True)
            replace_file(target / name, partial(_save, figure))
            paths.append(target / name)
    return paths


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=160, facecolor="white", metadata={"Software": None})


def step_time_figure(results: Results) -> Figure | None:
    """Bars as long as the median step time, split as the profiled pass splits a step."""
    rows = results.rows
    if not any(is_measured(row) for row in rows):
        return None
    bars = [phase_segments(row) if is_measured(row) else [] for row in rows]
    ends = [
        f"{row.step_time_ms.median:,.{_decimals(rows)}f}" if is_measured(row) and row.step_time_ms else ""
        for row in rows
    ]
    figure, (axes,) = bar_figure(rows, 1)
    spreads = [row.step_time_ms.mad if row.step_time_ms is not None else 0.0 for row in rows]
    draw_bars(axes, rows, bars, ends, _colours(PHASE_COLOURS, bars), overhang=spreads)
    for index, row in enumerate(rows):
        if is_measured(row) and row.step_time_ms is not None:
            axes.errorbar(
                row.step_time_ms.median,
                index,
                xerr=row.step_time_ms.mad,
                color=INK,
                capsize=2.5,
                elinewidth=1,
            )
    axes.set_xlabel("step time, ms (median, whiskers: MAD)")
    split = any(row.phases_ms for row in rows if is_measured(row))
    finish(
        figure,
        "Step time by phase" if split else "Step time",
        results,
        note=_phases_note(rows) if split else "",
    )
    return figure


def _phases_note(rows: Sequence[Row]) -> str:
    text = "Phases: shares of a separate profiled pass, scaled to the median"
    if any(row.settings.device == "cuda" for row in rows):
        text += " (on GPUs what it took longer comes off the waits)"
    return f"{text}."


def is_measured(row: Row) -> bool:
    return row.status == "ok" and row.step_time_ms is not None


def _decimals(rows: Sequence[Row]) -> int:
    smallest = min((row.step_time_ms.median for row in rows if row.step_time_ms is not None), default=1.0)
    return 0 if smallest >= 100 else 1 if smallest >= 10 else 2


def phase_segments(row: Row) -> list[Segment]:
    assert row.step_time_ms is not None
    median_ms = row.step_time_ms.median
    phases = {name: value for name, value in (row.phases_ms or {}).items() if value > 0}
    if not phases:
        return [(NOT_SPLIT, median_ms)]
    if row.settings.device == "cuda":
        for name in WAITS:
            excess_ms = max(sum(phases.values()) - median_ms, 0.0)
            phases[name] = max(phases.get(name, 0.0) - excess_ms, 0.0)
    total_ms = sum(phases.values())
    ordered = sorted(
        (name for name in phases if phases[name] > 0), key=lambda name: (_rank(name, PHASE_COLOURS), name)
    )
    return [(name, phases[name] * median_ms / total_ms) for name in ordered]


def _rank(name: str, order: dict[str, str]) -> int:
    return list(order).index(name) if name in order else len(order)


def memory_figure(results: Results) -> Figure | None:
    """Bars of the ledger's categories, one panel per tier; on the device the peak closes the bar."""
    rows = results.rows
    present = {
        tier
        for row in rows
        if row.status == "ok"
        for tier, categories in (row.memory_bytes or {}).items()
        if any(categories.values())
    }
    if any(row.status == "ok" and row.peak_device_bytes for row in rows):
        present.add("device")
    tiers = sorted(present, key=lambda tier: (TIER_ORDER.index(tier) if tier in TIER_ORDER else 9, tier))
    if not tiers:
        return None
    figure, panels = bar_figure(rows, len(tiers))
    by_tier = [[memory_segments(row, tier) for row in rows] for tier in tiers]
    colour = _colours(CATEGORY_COLOURS, [bar for bars in by_tier for bar in bars])
    for axes, tier, bars in zip(panels, tiers, by_tier, strict=True):
        unit, unit_bytes = memory_unit(int(sum(length for _, length in bar)) for bar in bars)
        scaled = [[(name, length / unit_bytes) for name, length in bar] for bar in bars]
        peaks = [row.peak_device_bytes if tier == "device" else None for row in rows]
        totals = [
            sum(length for _, length in bar) if peak is None else peak / unit_bytes
            for bar, peak in zip(scaled, peaks, strict=True)
        ]
        ends = [f"{total:,.1f}" if bar else "" for bar, total in zip(scaled, totals, strict=True)]
        draw_bars(axes, rows, scaled, ends, colour, absent="not measured" if tier == "device" else "")
        if tier == "device":
            _mark_peaks(axes, bars, peaks, unit_bytes)
        axes.set_xlabel(
            f"{TIERS.get(tier, tier)}, {unit}" + (" at the peak of a rank" if tier == "device" else "")
        )
    finish(figure, "Memory by category", results)
    return figure


def _mark_peaks(
    axes: Axes, bars: Sequence[Sequence[Segment]], peaks: Sequence[int | None], unit_bytes: int
) -> None:
    """A tick where the peak lies within a bar: categories peaked at different moments."""
    label = "peak"
    for index, (bar, peak) in enumerate(zip(bars, peaks, strict=True)):
        if peak is not None and sum(length for _, length in bar) > peak:
            at = peak / unit_bytes
            axes.plot([at, at], [index - 0.34, index + 0.34], color=INK, linewidth=2, label=label)
            label = "_"


def memory_segments(row: Row, tier: str) -> list[Segment]:
    if row.status != "ok":
        return []
    held = {name: value for name, value in ((row.memory_bytes or {}).get(tier) or {}).items() if value > 0}
    segments: list[Segment] = [
        (name, float(held[name]))
        for name in sorted(held, key=lambda name: (_rank(name, CATEGORY_COLOURS), name))
    ]
    rest = (row.peak_device_bytes or 0) - sum(held.values()) if tier == "device" else 0
    return [*segments, (REST, float(rest))] if rest > 0 else segments


def _colours(known: dict[str, str], bars: Sequence[Sequence[Segment]]) -> Callable[[str], str]:
    """The colour of a category; names that newer files may bring get further colours, by name."""
    names = sorted({name for bar in bars for name, _ in bar} - {*known, REST, NOT_SPLIT})
    extra = {name: UNKNOWN_COLOURS[index % len(UNKNOWN_COLOURS)] for index, name in enumerate(names)}
    return lambda name: known.get(name) or extra.get(name, REST_COLOUR)


def bar_figure(rows: Sequence[Row], panel_num: int) -> tuple[Figure, list[Axes]]:
    """Panels side by side, each with a bar a row; the first has their labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = shortened(row_labels(rows))
    line_num = max(label.count("\n") + 1 for label in labels)
    height = 1.75 + max(len(rows), 2) * max(0.36 if len(rows) <= 15 else 0.27, 0.16 * line_num)
    figure = Figure(figsize=(8.0, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(1, panel_num, sharey=True, squeeze=False)[0])
    panels[0].set_yticks(range(len(rows)), list(map(as_is, labels)))  # of all panels
    return figure, panels


def draw_bars(
    axes: Axes,
    rows: Sequence[Row],
    bars: Sequence[Sequence[Segment]],
    ends: Sequence[str],
    colour: Callable[[str], str],
    *,
    overhang: Sequence[float] | None = None,
    absent: str = "not measured",
) -> None:
    """Stacked horizontal bars from top to bottom, totals at their ends, statuses where there is no bar."""
    style_axes(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    longest = max((sum(length for _, length in bar) for bar in bars), default=0.0) or 1.0
    named: set[str] = set()
    for index, bar in enumerate(bars):
        left = 0.0
        for name, length in bar:
            is_new = name not in named and length >= _VISIBLE_SHARE * longest
            label = "_" if not is_new else name if name.startswith("exp_") else name.replace("_", " ")
            if is_new:
                named.add(name)
            axes.barh(
                index,
                length,
                0.68,
                left=left,
                color=colour(name),
                label=label,
                edgecolor="white",
                linewidth=0.5,
            )
            left += length
    for index, (row, bar, end) in enumerate(zip(rows, bars, ends, strict=True)):
        if bar:
            gap = (overhang[index] if overhang else 0.0) + 0.01 * longest
            axes.text(
                sum(length for _, length in bar) + gap, index, end, va="center", fontsize=8.5, color=INK
            )
        else:
            text = row.status if row.status != "ok" else absent
            axes.text(0.01 * longest, index, text, va="center", fontsize=8.5, color=MUTED, style="italic")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    reach = [sum(length for _, length in bar) for bar in bars]
    if overhang:
        reach = [end + more for end, more in zip(reach, overhang, strict=True)]
    axes.set_xlim(0, (max(reach, default=0.0) or 1.0) * 1.13)


def finish(figure: Figure, title: str, results: Results, *, note: str = "") -> None:
    """Title, what was run, and a legend below that shows each meaning once."""
    head(figure.axes[0], title, subtitle(results.rows))
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = [name.replace("_", " ") for name in (*PHASE_COLOURS, *CATEGORY_COLOURS)]
    names = sorted(
        entries, key=lambda name: order.index(key) if (key := name.replace("_", " ")) in order else 99
    )
    if names:
        figure.legend(
            [entries[name] for name in names],
            names,
            loc="outside lower center",
            ncols=min(len(entries), 5),
            fontsize=8.5,
            frameon=False,
            labelcolor=INK,
            handlelength=1.1,
            handleheight=1.0,
            columnspacing=1.4,
            title=note or None,
            title_fontproperties={"size": 8, "style": "italic"},
        )
