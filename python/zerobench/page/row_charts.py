"""Charts with a bar, a point or a line for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerobench.page.chart import (
    MOST_POINTS,
    Chart,
    Values,
    axis,
    bars,
    lines,
    lines_height,
    number,
    row_axis,
    shown,
    stacked_bars,
    thinned,
    tips,
)
from zerobench.report.plots import (
    CATEGORY_COLOURS,
    NOT_SPLIT,
    PHASE_COLOURS,
    REST,
    REST_COLOUR,
    TIERS,
    UNKNOWN_COLOURS,
    Segment,
    is_measured,
    memory_segments,
    phase_segments,
)
from zerobench.report.scatter import Point, has_point, pareto_front
from zerobench.results.rows import by_workload, row_labels, step_rate, workload_heads
from zerobench.results.schema import Row
from zerobench.results.sizes import memory_unit

Labelled = list[tuple[str, Row]]

ON_FRONT, BEATEN, APART = "on the front", "beaten in both", "other dtypes, not ranked"


def labelled(rows: Sequence[Row]) -> Labelled:
    """Return rows after the texts that tell them apart."""
    return list(zip(row_labels(rows), rows, strict=True))


def row_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return charts of time, memory and speed against memory."""
    return shown([_phases_chart(rows), *_memory_charts(rows), *_front_charts(rows)])


def course_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return charts of what a row did from step to step, and of power and energy."""
    return shown([_loss_chart(rows), _runs_chart(rows), _steps_chart(rows), *_energy_charts(rows)])


def _phases_chart(rows: Sequence[Row]) -> Chart:
    bars_by_row = [(label, phase_segments(row)) for label, row in labelled(rows) if is_measured(row)]
    return _parts_chart(
        "Step time by phase",
        "Median step time of each row, split as its profiled steps were. Less is better.",
        bars_by_row,
        unit="ms a step",
        colours=PHASE_COLOURS,
        divisor=1.0,
    )


def _memory_charts(rows: Sequence[Row]) -> list[Chart]:
    held = {
        tier: [(label, memory_segments(row, tier)) for label, row in labelled(rows) if row.status == "ok"]
        for tier in TIERS
    }
    charts = []
    for tier, word in TIERS.items():
        unit, divisor = memory_unit(int(sum(size for _, size in segments)) for _, segments in held[tier])
        charts.append(
            _parts_chart(
                f"Memory by category: {word}",
                "What the rank that holds most has in this tier. On the device, the rest is the peak without the "
                "categories.",
                held[tier],
                unit=unit,
                colours=CATEGORY_COLOURS,
                divisor=float(divisor),
            )
        )
    return charts


def _parts_chart(
    title: str,
    text: str,
    found: Sequence[tuple[str, Sequence[Segment]]],
    *,
    unit: str,
    colours: dict[str, str],
    divisor: float,
) -> Chart:
    """Names that newer files bring follow the known ones, in colours of their own."""
    names = dict.fromkeys(name for _, segments in found for name, _ in segments)
    known = [name for name in colours if name in names]
    new = sorted(name for name in names if name not in colours and name not in {REST, NOT_SPLIT})
    last = [name for name in (REST, NOT_SPLIT) if name in names]
    palette = {name: UNKNOWN_COLOURS[index % len(UNKNOWN_COLOURS)] for index, name in enumerate(new)}
    palette = {**colours, **palette, REST: REST_COLOUR, NOT_SPLIT: REST_COLOUR}
    values = [
        {"row": label, "part": _words(name), "value": number(size / divisor)}
        for label, segments in found
        for name, size in segments
    ]
    ordered = {_words(name): palette[name] for name in [*known, *new, *last]}
    return stacked_bars(title, text, values, unit=unit, colours=ordered)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _front_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return a chart a workload, since rates of different tasks do not compare."""
    groups = [group for group in by_workload(rows) if any(has_point(row) for row in group)]
    heads = workload_heads([group[0] for group in groups]) if groups else []
    return [_front_chart(group, head) for group, head in zip(groups, heads, strict=True)]


def _front_chart(rows: Sequence[Row], head: str) -> Chart:
    unit, divisor = memory_unit(row.peak_device_bytes for row in rows)
    points = [
        Point(label, (row.peak_device_bytes or 0) / divisor, step_rate(row) or 0.0, row.comparable)
        for label, row in labelled(rows)
        if has_point(row)
    ]
    front = {point.label for point in pareto_front(points)}
    values = [
        {
            "row": point.label,
            "memory": number(point.memory),
            "rate": number(point.rate),
            "front": _front_word(point, front),
        }
        for point in points
    ]
    fields = {"row": "row", "memory": unit, "rate": "tokens/s", "front": "front"}
    x = axis("memory", f"peak device memory of a rank, {unit}", scale={"zero": False})
    y = axis("rate", "tokens/s", scale={"zero": False})
    kind = {"domain": [ON_FRONT, BEATEN, APART], "range": ["circle", "cross", "diamond"]}
    hue = {**kind, "range": ["#0072B2", "#D55E00", "#888888"]}
    mark = {
        "x": x,
        "y": y,
        "color": {"field": "front", "type": "nominal", "title": None, "scale": hue},
        "shape": {"field": "front", "type": "nominal", "title": None, "scale": kind},
        "tooltip": tips(fields),
    }
    line: dict[str, Any] = {
        "transform": [{"filter": {"field": "front", "equal": ON_FRONT}}],
        "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [4, 3], "color": "#0072B2"},
        "encoding": {"x": x, "y": y},
    }
    names: dict[str, Any] = {
        "transform": [{"filter": {"field": "front", "equal": ON_FRONT}}],
        "mark": {"type": "text", "dy": -11, "align": "center", "limit": 150},
        "encoding": {"x": x, "y": y, "text": {"field": "row"}},
    }
    dots = {"mark": {"type": "point", "filled": True, "size": 90, "opacity": 1}, "encoding": mark}
    spec = {"height": 320, "layer": [line, dots, names]}
    text = "Up and left is better. No row beats those on the front in both speed and memory."
    title = f"Speed against memory{': ' if head else ''}{head}"
    return Chart(title=title, text=text, spec=spec, values=values, heads=fields)


def _front_word(point: Point, front: set[str]) -> str:
    return ON_FRONT if point.label in front else BEATEN if point.comparable else APART


def _loss_chart(rows: Sequence[Row]) -> Chart:
    values = [
        {"series": label, "step": step, "value": loss}
        for label, row in labelled(rows)
        if row.status == "ok" and row.loss
        for step, loss in thinned(row.loss)
    ]
    return lines(
        "Loss curves",
        "Training loss, averaged over ranks, in the measured steps. Click a name in the legend to bring it out.",
        values,
        x=axis("step", "measured step"),
        y=axis("value", "loss", scale={"zero": False}),
        heads={"series": "row", "step": "step", "value": "loss"},
    )


def _samples(rows: Sequence[Row]) -> Values:
    """Each step with its run."""
    return [
        {"row": label, "step": step, "run": str(1 + (step - 1) // row.settings.num_steps), "value": time}
        for label, row in labelled(rows)
        if is_measured(row) and row.step_time_ms is not None
        for step, time in thinned(row.step_time_ms.samples)
    ]


_SAMPLE_HEADS = {"row": "row", "step": "step", "run": "run", "value": "ms"}
_THINNED = f"Rows with more than {MOST_POINTS} samples are thinned evenly."


def _runs_chart(rows: Sequence[Row]) -> Chart:
    values = _samples(rows)
    encoding = {
        "y": row_axis(),
        "x": axis("value", "ms a step", scale={"zero": False}),
        "color": {"field": "run", "type": "nominal", "title": "run"},
        "yOffset": {"field": "run", "type": "nominal"},
        "tooltip": tips(_SAMPLE_HEADS),
    }
    mark = {"type": "tick", "thickness": 1.5}
    spec = {"height": lines_height(values, line=28), "mark": mark, "encoding": encoding}
    text = f"A line for each measured step, by run: how far steps spread, and whether runs agree. {_THINNED}"
    return Chart(title="Samples by run", text=text, spec=spec, values=values)


def _steps_chart(rows: Sequence[Row]) -> Chart | None:
    values = _samples(rows)
    names = list(dict.fromkeys(value["row"] for value in values))
    if not names:
        return None
    pick = {
        "name": "picked",
        "value": names[0],
        "bind": {"input": "select", "options": names, "name": "row "},
    }
    spec = {
        "height": 240,
        "params": [pick],
        "transform": [{"filter": "datum.row === picked"}],
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": axis("step", "measured step"),
            "y": axis("value", "ms", scale={"zero": False}),
            "color": {"field": "run", "type": "nominal", "title": "run"},
            "tooltip": tips(_SAMPLE_HEADS),
        },
    }
    text = f"Step times of one row in the order they were measured. {_THINNED}"
    return Chart(title="Samples of one row", text=text, spec=spec, values=values)


def _energy_charts(rows: Sequence[Row]) -> list[Chart]:
    ok = [(label, row) for label, row in labelled(rows) if row.status == "ok"]
    power = [(label, row.sampled.power_w if row.sampled else None) for label, row in ok]
    energy = [(label, row.energy_per_step_j) for label, row in ok]
    rate = [(label, row.tokens_per_j) for label, row in ok]
    return [
        bars("Power", "Mean power of one GPU in the measured steps.", _numbers(power), unit="W"),
        bars("Energy of a step", "All GPUs together. Less is better.", _numbers(energy), unit="J a step"),
        bars("Tokens by energy", "All GPUs together. More is better.", _numbers(rate), unit="tokens/J"),
    ]


def _numbers(found: Sequence[tuple[str, float | None]]) -> Values:
    return [{"row": label, "value": number(value)} for label, value in found if number(value) is not None]
