"""Speed against memory: one point a row, labels that never overlap, the Pareto front drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from zerobench.report.style import GRID, INK, MUTED, as_is, head, shortened, style_axes, subtitle
from zerobench.results.rows import by_workload, has_peak, may_be_ranked, row_labels, step_rate
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import memory_unit
from zerobench.strategies.catalogue import FLOOR

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

FRONT_COLOUR, OTHER_COLOUR = "#0072B2", "#9a9a9a"


class Point(NamedTuple):
    label: str
    memory: float
    rate: float
    comparable: bool


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def hits(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def inside(self, other: Box) -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Comparable points that no other one beats in both speed and memory, from least memory up."""
    front: list[Point] = []
    ranked = [point for point in points if point.comparable]
    for point in sorted(ranked, key=lambda point: (point.memory, -point.rate, point.label)):
        if not front or point.rate > front[-1].rate:
            front.append(point)
    return front


def speed_memory_figure(results: Results) -> Figure | None:
    """One panel per workload, since rates of different tasks do not compare."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels: dict[int, str] = {}
    groups = []
    for workload in by_workload(results.rows):
        labels.update(zip((id(row) for row in workload), row_labels(workload), strict=True))
        if rows := [row for row in workload if has_point(row)]:
            groups.append(rows)
    if not groups:
        return None
    unit, unit_bytes = memory_unit(row.peak_device_bytes for rows in groups for row in rows)
    column_num = min(2, len(groups))
    line_num = math.ceil(len(groups) / column_num)
    crowded = max(len(rows) for rows in groups) > 14
    size = (8.0, (6.4 if crowded else 4.8)) if len(groups) == 1 else (10.0, 4.4 * line_num)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(line_num, column_num, squeeze=False).flat)
    for axes in panels[len(groups) :]:
        axes.remove()
    drawn: list[tuple[Axes, list[Point]]] = []
    for axes, rows in zip(panels, groups, strict=False):
        points = [
            Point(
                labels[id(row)],
                (row.peak_device_bytes or 0) / unit_bytes,
                step_rate(row) or 0.0,
                row.comparable and may_be_ranked(row),
            )
            for row in rows
        ]
        _draw_points(axes, points)
        head(axes, "Speed against memory" if axes is panels[0] else "", subtitle(rows))
        axes.set_xlabel(f"peak device memory of a rank, {unit}")
        axes.set_ylabel("tokens/s")
        drawn.append((axes, points))
    legend: dict[str, Artist] = {}  # of all panels: one may have what others lack
    for axes, _ in drawn:
        handles, names = axes.get_legend_handles_labels()
        legend.update(zip(names, handles, strict=True))
    figure.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        ncols=3,
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
    )
    figure.draw_without_rendering()  # settles the layout, so that labels are placed in final pixels
    figure.set_layout_engine("none")
    for axes, points in drawn:
        _place_labels(axes, points)
    return figure


def has_point(row: Row) -> bool:
    measured = row.status == "ok" and step_rate(row) is not None and has_peak(row)
    return measured and row.strategy != FLOOR  # which has the rate of one GPU, and trains nothing


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    style_axes(axes)
    axes.grid(color=GRID, linewidth=0.8)
    front = pareto_front(points)
    if len(front) > 1:
        axes.plot(
            [point.memory for point in front],
            [point.rate for point in front],
            color=FRONT_COLOUR,
            linewidth=1.3,
            alpha=0.5,
            drawstyle="steps-post",
            zorder=2,
        )
    others = [point for point in points if point.comparable and point not in front]
    apart = [point for point in points if not point.comparable]
    for name, chosen, colour, face, marker in (
        ("on the Pareto front", front, FRONT_COLOUR, FRONT_COLOUR, "o"),
        ("matched or beaten in speed and memory by another row", others, OTHER_COLOUR, OTHER_COLOUR, "o"),
        ("other dtypes or a busy machine, not ranked", apart, MUTED, "white", "D"),
    ):
        if chosen:
            axes.scatter(
                [point.memory for point in chosen],
                [point.rate for point in chosen],
                s=46,
                marker=marker,
                facecolor=face,
                edgecolor=colour if face == "white" else "white",
                linewidth=1.2 if face == "white" else 0.8,
                label=name,
                zorder=4 if chosen is front else 3,
            )
    _set_limits(axes, points)


def _set_limits(axes: Axes, points: Sequence[Point]) -> None:
    memories, rates = [point.memory for point in points], [point.rate for point in points]
    for values, setter in ((memories, axes.set_xlim), (rates, axes.set_ylim)):
        low, high = min(values), max(values)
        # Ratios are what matters: an axis that starts near zero keeps small differences looking small.
        margin = max(0.12 * (high - low), 0.04 * high)
        start = 0.0 if low < 0.6 * high else max(0.0, low - 2 * margin)
        setter(start, high + 1.6 * margin)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")


def _place_labels(axes: Axes, points: Sequence[Point]) -> None:
    """A label without a free place nearby is left out, and a corner counts those: there no label may lie then."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()
    drawn, missing = _drawn_labels(axes, points, renderer, [])
    if not missing:
        return
    for artist in drawn:
        artist.remove()
    note = axes.text(
        0,
        0,
        _left_out_text(len(points)),  # as long as it can become
        transform=axes.transAxes,
        fontsize=8,
        color=MUTED,
        style="italic",
    )
    corner = _freest_corner(note, renderer, _boxes_of_points(axes, points))
    _, missing = _drawn_labels(axes, points, renderer, [corner])
    note.set_text(_left_out_text(missing))


def _freest_corner(note: Text, renderer: RendererAgg, taken: Sequence[Box]) -> Box:
    """Puts the note into the corner where it covers the fewest points; its box there."""
    found: list[tuple[int, int, Box, tuple[float, float], tuple[str, str]]] = []
    for right, top in ((True, False), (False, True), (False, False), (True, True)):
        place = (0.99 if right else 0.01, 0.99 if top else 0.01)
        alignment = ("right" if right else "left", "top" if top else "bottom")
        note.set(position=place, ha=alignment[0], va=alignment[1])
        extent = note.get_window_extent(renderer)
        box = Box(extent.x0, extent.y0, extent.x1, extent.y1)
        found.append((sum(box.hits(other) for other in taken), len(found), box, place, alignment))
    _, _, box, place, alignment = min(found)
    note.set(position=place, ha=alignment[0], va=alignment[1])
    return box


def _boxes_of_points(axes: Axes, points: Sequence[Point]) -> list[Box]:
    """In pixels: points and the lines of the front."""
    centres = {point: tuple(axes.transData.transform((point.memory, point.rate))) for point in points}
    radius = 4.5 * axes.figure.dpi / 72
    boxes = [Box(x - radius, y - radius, x + radius, y + radius) for x, y in centres.values()]
    for (x0, y0), (x1, y1) in pairwise([centres[point] for point in pareto_front(points)]):
        boxes += [Box(x0, y0 - 1, x1, y0 + 1), Box(x1 - 1, y0, x1 + 1, y1)]
    return boxes


def _left_out_text(missing: int) -> str:
    words = "1 label" if missing == 1 else f"{missing} labels"
    return f"{words} omitted for space; the table names every row"


def _drawn_labels(
    axes: Axes, points: Sequence[Point], renderer: RendererAgg, kept_free: list[Box]
) -> tuple[list[Artist], int]:
    """Draw labels and return them, and how many found no place. Greedy: the front first, then by speed. Each label
    takes the nearest free place around its point, further out with a leader."""
    from matplotlib.patheffects import withStroke

    scale = axes.figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    bounds = Box(frame.x0 + 2, frame.y0 + 2, frame.x1 - 2, frame.y1 - 2)
    inverse = axes.transData.inverted()
    centres = {point: tuple(axes.transData.transform((point.memory, point.rate))) for point in points}
    taken = _boxes_of_points(axes, points) + kept_free
    front = pareto_front(points)
    short = dict(zip(points, shortened([point.label for point in points], limit=34), strict=True))
    drawn: list[Artist] = []
    missing = 0
    for point in sorted(points, key=lambda point: (point not in front, -point.rate, point.label)):
        text = axes.text(
            0,
            0,
            as_is(short[point]),
            fontsize=8.5,
            color=INK,
            fontweight="bold" if point in front else "normal",
            ha="center",
            va="center",
            zorder=5,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
        extent = text.get_window_extent(renderer)
        place = _free_place(
            centres[point], extent.width + 4 * scale, extent.height + 2 * scale, scale, bounds, taken
        )
        if place is None:
            text.remove()
            missing += 1
            continue
        box, leader = place
        drawn.append(text)
        taken += [box, *leader]
        text.set_position(tuple(inverse.transform(((box.left + box.right) / 2, (box.bottom + box.top) / 2))))
        if leader:
            (x0, y0), (x1, y1) = (
                inverse.transform(centres[point]),
                inverse.transform(_nearest(box, centres[point])),
            )
            drawn += axes.plot([x0, x1], [y0, y1], color=MUTED, linewidth=0.7, zorder=1)
    return drawn, missing


def _free_place(
    centre: tuple[float, float], width: float, height: float, scale: float, bounds: Box, taken: Sequence[Box]
) -> tuple[Box, list[Box]] | None:
    """The nearest free box for a label, and the boxes that its leader covers (none where it sits at its point)."""
    for box, distance in _places(*centre, width, height, scale):
        if not box.inside(bounds) or any(box.hits(other) for other in taken):
            continue
        leader = _leader_boxes(centre, _nearest(box, centre), scale) if distance > 10 else []
        if not any(step.hits(other) for step in leader for other in taken):
            return box, leader
    return None


def _nearest(box: Box, centre: tuple[float, float]) -> tuple[float, float]:
    return min(max(centre[0], box.left), box.right), min(max(centre[1], box.bottom), box.top)


def _leader_boxes(start: tuple[float, float], end: tuple[float, float], scale: float) -> list[Box]:
    """Small boxes along a line, from outside the point that it starts at to just before the label."""
    length = math.dist(start, end)
    step, first = 3 * scale, 6 * scale
    boxes = []
    for index in range(max(0, int((length - first) / step))):
        share = (first + index * step) / length
        x, y = start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])
        boxes.append(Box(x - 1, y - 1, x + 1, y + 1))
    return boxes


def _places(x: float, y: float, width: float, height: float, scale: float) -> Iterator[tuple[Box, float]]:
    """Boxes around a point, nearest first, with their distance in points."""
    for distance in (6, 10, 16, 24, 34, 46, 60):
        reach = distance * scale
        for degrees in (0, 180, 90, 270, 45, 315, 135, 225, 20, 340, 160, 200, 70, 290, 110, 250):
            angle = math.radians(degrees)
            across, up = math.cos(angle), math.sin(angle)
            middle_x = x + across * (reach + width / 2)
            middle_y = y + up * (reach + height / 2)
            yield (
                Box(middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2),
                distance,
            )
