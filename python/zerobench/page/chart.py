"""A chart as data: a Vega-Lite specification, what to say of it, and its values as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_TABLE_VALUES = 200  # more of them stand in the result file alone
MOST_POINTS = 200  # of one row in one chart: what is longer is thinned

Values = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Names of fields are ours and texts of a result file stand in values alone, so that none is an expression."""

    title: str
    text: str
    spec: dict[str, Any]
    values: Values
    heads: dict[str, str] = field(default_factory=dict)  # what the table calls the fields

    def full_spec(self) -> dict[str, Any]:
        """Return the specification with its values and a description for screen readers."""
        return {**self.spec, "description": f"{self.title}. {self.text}", "data": {"values": self.values}}

    def table(self) -> list[list[str]]:
        """Return the values below a line of heads, or nothing if they are too many."""
        if not self.heads or len(self.values) > MOST_TABLE_VALUES:
            return []
        lines = [[_cell(value.get(name)) for name in self.heads] for value in self.values]
        return [list(self.heads.values()), *lines]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def number(value: float | None) -> float | None:
    """Return the value to six digits, or None if a chart cannot hold it."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def thinned(values: Sequence[float]) -> list[tuple[int, float]]:
    """Return numbered values, counted from 1: all of them, or evenly spaced ones if they are too many."""
    stride = math.ceil(len(values) / MOST_POINTS) or 1
    return [
        (index + 1, value)
        for index in range(0, len(values), stride)
        if (value := number(values[index])) is not None
    ]


def axis(name: str, title: str, **more: Any) -> dict[str, Any]:
    """Return an encoding of numbers."""
    return {"field": name, "type": "quantitative", "title": title, **more}


def row_axis() -> dict[str, Any]:
    """Return the encoding that gives each row a line, in the order of the values."""
    return {"field": "row", "type": "nominal", "sort": None, "title": None}


def lines_height(values: Values, *, line: int = 24) -> int:
    """Return the height of a chart with a line for each row."""
    return line * len({value["row"] for value in values})


def tips(fields: dict[str, str]) -> list[dict[str, Any]]:
    """Return what a tooltip shows, given titles by field."""
    return [
        {"field": name, "title": title, **({"type": "quantitative", "format": ",.4~r"} if numeric else {})}
        for name, title in fields.items()
        for numeric in [name in {"value", "memory", "rate"}]
    ]


def bars(title: str, text: str, values: Values, *, unit: str) -> Chart:
    """Return a bar a row."""
    heads = {"row": "row", "value": unit}
    encoding = {"y": row_axis(), "x": axis("value", unit), "tooltip": tips(heads)}
    spec = {"height": lines_height(values), "mark": "bar", "encoding": encoding}
    return Chart(title=title, text=text, spec=spec, values=values, heads=heads)


def stacked_bars(title: str, text: str, values: Values, *, unit: str, colours: dict[str, str]) -> Chart:
    """Return a bar a row, made of parts in the order of ``colours``."""
    order = {part: index for index, part in enumerate(colours)}
    values = [{**value, "order": order[value["part"]]} for value in values]
    heads = {"row": "row", "part": "part", "value": unit}
    colour = {
        "field": "part",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(colours), "range": list(colours.values())},
    }
    encoding = {
        "y": row_axis(),
        "x": axis("value", unit),
        "color": colour,
        "order": {"field": "order"},
        "tooltip": tips(heads),
    }
    spec = {"height": lines_height(values), "mark": "bar", "encoding": encoding}
    return Chart(title=title, text=text, spec=spec, values=values, heads=heads)


def lines(
    title: str, text: str, values: Values, *, x: dict[str, Any], y: dict[str, Any], heads: dict[str, str]
) -> Chart:
    """Return a line a series; a click in the legend brings one out."""
    encoding = {
        "x": x,
        "y": y,
        "color": {"field": "series", "type": "nominal", "sort": None, "title": None},
        "opacity": {"condition": {"param": "series", "value": 1}, "value": 0.12},
        "tooltip": tips(heads),
    }
    spec = {
        "height": 300,
        "params": [{"name": "series", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}],
        "mark": {"type": "line", "point": len(values) <= MOST_TABLE_VALUES},
        "encoding": encoding,
    }
    return Chart(title=title, text=text, spec=spec, values=values, heads=heads)


def shown(charts: Iterable[Chart | None]) -> list[Chart]:
    """Return the charts that have something to show."""
    return [chart for chart in charts if chart is not None and chart.values]
