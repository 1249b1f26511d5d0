"""Charts of a column as data: charts, their lines, the rows of each line, and uncertainties."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerobench.errors import ConfigError
from zerobench.report.frame import flat_row
from zerobench.report.network_facts import speed_of
from zerobench.results.merging import Merged
from zerobench.results.rows import flat_settings, is_known, setting_text, varying_settings
from zerobench.results.schema import Row
from zerobench.results.settings import SETTINGS, chart_axes
from zerobench.strategies.catalogue import OFFLOADS

X_AXES = chart_axes()
"""Settings that may be the horizontal axis: word for ``--x``, and dotted key."""
SERIES = {"strategy": "strategy", **X_AXES}
"""Settings that can tell lines apart: dotted keys by their word for ``--by``."""

_MODEL_FIELDS = "model_config_resolved."
# Columns that are a constant over the step time: their spread is that of the step times.
_RATES = ("tokens_per_s", "samples_per_s", "tokens_per_s_per_peak_gb", "mfu.pct", "mfu.tflops_per_gpu")


class Spread(NamedTuple):
    """How far a value may be off."""

    low: float
    high: float
    word: str


class Point(NamedTuple):
    x: Any
    y: float
    spread: Spread | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The rows of one chart that share what tells lines apart, on one machine."""

    value: Any
    source: str
    """Source of the results, if charts hold several machines or versions; else empty."""
    points: list[Point]
    out_of_memory: list[Any]
    """Values of x at which the row ran out of memory."""

    @property
    def label(self) -> str:
        return f"{setting_text(self.value)} ({self.source})" if self.source else setting_text(self.value)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: all rows that differ in nothing but its two axes and what tells its lines apart."""

    metric: str
    x: str
    """The word for ``--x``."""
    fixed: dict[str, Any]
    """Settings that differ from chart to chart, with the values in this one."""
    following: list[str]
    """Settings that change along x."""
    x_values: list[Any]
    lines: list[Line]
    rows: list[Row]


class _Placed(NamedTuple):
    """A row that a chart shows."""

    row: Row
    source: str
    value: float | None


def charts_of(merged: Sequence[Merged], *, metric: str, x: str, by: str) -> list[Chart]:
    """Return the charts of a numeric column, one for each combination of the settings that neither is on an axis nor
    tells lines apart. Only ok rows have values; rows out of memory are marked. Raises ConfigError."""
    x_key, by_key = axis_keys(x, by)
    rows = [row for found in merged for row in found.results.rows]
    expect_numeric(metric, [flat_row(row) for row in rows if row.status == "ok"], or_else="loss, or ")
    placed = [
        _Placed(
            row, source_text(found.sources) if len(merged) > 1 else "", _number(flat_row(row).get(metric))
        )
        for found in merged
        for row in found.results.rows
        if row.status in ("ok", "oom")
    ]
    placed = [each for each in placed if each.row.status == "oom" or each.value is not None]
    shown = [each.row for each in placed]
    apart, following = _other_settings(shown, x_key, by_key)
    x_values = ordered_values(x_key, shown)
    groups: dict[str, list[_Placed]] = {}
    for each in placed:
        groups.setdefault(repr([value_of(each.row, key) for key in apart]), []).append(each)
    return [
        Chart(
            metric=metric,
            x=x,
            fixed={key: value_of(group[0].row, key) for key in apart},
            following=following,
            x_values=[
                value for value in x_values if any(value_of(each.row, x_key) == value for each in group)
            ],
            lines=_lines(group, metric, x_key, by_key),
            rows=[each.row for each in group],
        )
        for group in groups.values()
        if any(each.value is not None for each in group)
    ]


def axis_keys(x: str, by: str) -> tuple[str, str]:
    """Return the settings of ``--x`` and ``--by``. Raise ConfigError that names what is allowed."""
    x_key, by_key = _key_of("--x", x, X_AXES), _key_of("--by", by, SERIES)
    if x_key == by_key:
        raise ConfigError(f"--x and --by are both {x}: give two different settings")
    return x_key, by_key


def source_text(sources: Sequence[str]) -> str:
    """Return words for the results that several paths hold together."""
    return sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"


def _key_of(option: str, word: str, known: dict[str, str]) -> str:
    if word not in known:
        raise ConfigError(f"{option} {word!r} is unknown: give one of {', '.join(known)}")
    return known[word]


def expect_numeric(metric: str, flats: Iterable[Mapping[str, Any]], *, or_else: str = "") -> None:
    """Raise ConfigError unless ``metric`` is a column with a number in at least one of the flat rows.

    ``or_else`` is what the option takes besides columns, as the message has it."""
    found: dict[str, None] = {}
    for flat in flats:
        found.update({key: None for key, value in flat.items() if _number(value) is not None})
    if metric in found:
        return
    columns = [key for key in found if not key.startswith("settings.")]
    if not columns:
        raise ConfigError(
            "no row is ok, so there is no number to draw: `zerobench show` says why rows failed"
        )
    near = difflib.get_close_matches(metric, columns, n=3, cutoff=0.5)
    near += [key for key in columns if metric.lower() in key.lower() and key not in near]
    hint = f" Did you mean {' or '.join(near[:5])}?" if near else ""
    raise ConfigError(
        f"--metric {metric!r} is not a numeric column of these results.{hint} Give {or_else}one of: "
        f"{', '.join(columns)}"
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def value_of(row: Row, key: str) -> Any:
    """Return a row's strategy, or its setting with a dotted key."""
    return row.strategy if key == "strategy" else flat_settings(row).get(key)


def ordered_values(key: str, rows: Sequence[Row]) -> list[Any]:
    """Return the values of a setting from small to large: models by parameters, offloads by what leaves the device,
    networks from the fastest on."""
    values = list(dict.fromkeys(value_of(row, key) for row in rows))
    if key == "model":
        counts = {row.settings.model: row.settings.parameter_count or 0 for row in rows}
        return sorted(values, key=lambda value: counts[value])
    if key == "network":
        return sorted(values, key=speed_of, reverse=True)
    if key == "offload":
        return sorted(values, key=lambda value: OFFLOADS.index(value) if value in OFFLOADS else len(OFFLOADS))
    return sorted(values, key=lambda value: (value is None, value if _number(value) is not None else 0))


def _other_settings(rows: Sequence[Row], x_key: str, by_key: str) -> tuple[list[str], list[str]]:
    """Return the settings that tell charts apart, and those that change along x.

    A setting that x alone or the line alone decides tells no charts apart, nor does one that is only known after a run
    and that both decide."""
    free, tied = varying_settings(rows)
    keys = [key for key in (*free, *tied) if key not in (x_key, by_key, "repeats")]
    if by_key != "strategy" and len({row.strategy for row in rows}) > 1:
        keys.insert(0, "strategy")
    if "model" in (x_key, by_key):
        keys = [key for key in keys if not key.startswith(_MODEL_FIELDS)]
    apart: list[str] = []
    following: list[str] = []
    for key in keys:
        if _is_decided(key, rows, lambda row: value_of(row, by_key)):
            continue
        if _is_decided(key, rows, lambda row: value_of(row, x_key)):
            if key == "strategy" or not (SETTINGS[key].quiet if key in SETTINGS else True):
                following.append(key)
            continue
        after_run = key in SETTINGS and SETTINGS[key].known_after_run
        if after_run and _is_decided(key, rows, lambda row: (value_of(row, x_key), value_of(row, by_key))):
            continue
        if not _is_decided(key, rows, lambda row: [value_of(row, other) for other in apart]):
            apart.append(key)
    return apart, following


def _is_decided(key: str, rows: Sequence[Row], by: Callable[[Row], Any]) -> bool:
    """Return whether rows that agree in ``by`` also agree in a setting."""
    seen: dict[str, str] = {}
    for row in rows:
        if is_known(key, row):
            value = repr(value_of(row, key))
            if seen.setdefault(repr(by(row)), value) != value:
                return False
    return True


def _lines(group: Sequence[_Placed], metric: str, x_key: str, by_key: str) -> list[Line]:
    """Return the lines of a chart in the order of their rows, each from small to large x."""
    by_line: dict[tuple[str, str], list[_Placed]] = {}
    for each in group:
        by_line.setdefault((repr(value_of(each.row, by_key)), each.source), []).append(each)
    order = {repr(value): index for index, value in enumerate(ordered_values(x_key, [e.row for e in group]))}
    lines = []
    for (_, source), found in by_line.items():
        points = [
            Point(value_of(each.row, x_key), each.value, spread_of(each.row, metric))
            for each in found
            if each.value is not None and each.row.status == "ok"
        ]
        lines.append(
            Line(
                value=value_of(found[0].row, by_key),
                source=source,
                points=sorted(points, key=lambda point: order[repr(point.x)]),
                out_of_memory=[value_of(each.row, x_key) for each in found if each.row.status == "oom"],
            )
        )
    return lines


def spread_of(row: Row, metric: str) -> Spread | None:
    """Return how far a column's value may be off, or None where the row does not tell."""
    flat = flat_row(row)
    value, time = _number(flat.get(metric)), row.step_time_ms
    if value is None:
        return None
    low, high = _number(flat.get(f"{metric}_low")), _number(flat.get(f"{metric}_high"))
    if low is not None and high is not None:
        return Spread(low, high, "95 % interval")
    error = _number(flat.get(f"{metric}_uncertainty"))
    if error is not None:
        return Spread(value - error, value + error, "standard error")
    if time is None or len(time.samples) < 2:
        return None
    if metric == "step_time_ms.median":
        return Spread(value - time.mad, value + time.mad, "MAD")
    if metric == "step_time_ms.mean":
        return Spread(value - time.std, value + time.std, "standard deviation")
    if metric in _RATES and time.mad < time.median:
        slowest, fastest = time.median + time.mad, time.median - time.mad
        return Spread(value * time.median / slowest, value * time.median / fastest, "MAD of the step times")
    return None
