"""Charts over the settings that the grid varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerobench.page.chart import Chart, Values, axis, lines, number, shown
from zerobench.results.rows import (
    flat_settings,
    is_known,
    labelled_setting,
    setting_text,
    setting_word,
    step_rate,
    varying_settings,
)
from zerobench.results.schema import Row
from zerobench.results.sizes import memory_unit

Figure = Callable[[Row], float | None]


def grid_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return speed and memory over each setting that a strategy has several values of."""
    ok = [row for row in rows if row.status == "ok"]
    unit, divisor = memory_unit(row.peak_device_bytes for row in ok)
    charts = []
    for key in varying_settings(ok)[0] if ok else []:
        word = setting_word(key)
        memory = f"peak device memory, {unit}"
        charts += [
            _over(ok, key, f"Tokens/s by {word}", "tokens/s", step_rate),
            _over(ok, key, f"Peak memory by {word}", memory, lambda row: _peak(row, divisor)),
        ]
    return shown(charts)


def scaling_charts(rows: Sequence[Row]) -> list[Chart]:
    """Return the speed of a rank by the number of ranks, compared with the fewest that were measured."""
    ok = [row for row in rows if row.status == "ok" and step_rate(row) is not None]
    fewest: dict[str, tuple[int, float]] = {}
    for series, row in _series(ok, "world_size"):
        each = (step_rate(row) or 0.0) / row.settings.world_size
        fewest[series] = min(
            fewest.get(series, (row.settings.world_size, each)), (row.settings.world_size, each)
        )
    values: Values = [
        {
            "series": series,
            "ranks": row.settings.world_size,
            "value": number(100 * (step_rate(row) or 0.0) / row.settings.world_size / fewest[series][1]),
        }
        for series, row in _series(ok, "world_size")
        if fewest[series][1] > 0
    ]
    values = _with_two(sorted(values, key=lambda value: value["ranks"]), "ranks")
    return shown(
        [
            lines(
                "Scaling",
                "Tokens/s of one rank, in % of the same row with the fewest ranks. 100 % is perfect scaling.",
                values,
                x=_steps_axis("ranks", "ranks"),
                y=axis("value", "% of the fewest ranks"),
                heads={"series": "row", "ranks": "ranks", "value": "%"},
            )
        ]
    )


def _peak(row: Row, divisor: int) -> float | None:
    return row.peak_device_bytes / divisor if row.peak_device_bytes else None


def _series(rows: Sequence[Row], key: str) -> list[tuple[str, Row]]:
    """Return rows after the text of all that is varied but ``key``."""
    free = [other for other in varying_settings(rows)[0] if other != key] if rows else []
    found = []
    for row in rows:
        flat = flat_settings(row)
        words = [labelled_setting(other, flat.get(other)) for other in free if is_known(other, row)]
        found.append((", ".join([row.strategy, *words]), row))
    return found


def _over(rows: Sequence[Row], key: str, title: str, unit: str, figure: Figure) -> Chart:
    found = [
        (series, flat_settings(row).get(key), number(figure(row)))
        for series, row in _series(rows, key)
        if is_known(key, row)
    ]
    numeric = all(isinstance(at, int | float) and not isinstance(at, bool) for _, at, _ in found)
    if numeric:
        found.sort(key=lambda one: float(one[1] or 0))
    values: Values = [
        {"series": series, "setting": setting_text(at), "value": value}
        for series, at, value in found
        if value is not None
    ]
    values = _with_two(values, "setting")
    word = setting_word(key)
    return lines(
        title,
        "A line for each row that was measured with several values, all else equal.",
        values,
        x=_steps_axis("setting", word),
        y=axis("value", unit),
        heads={"series": "row", "setting": word, "value": unit},
    )


def _steps_axis(name: str, title: str) -> dict[str, Any]:
    """Return an encoding with a place for each value that occurs, in the order of the values."""
    return {
        "field": name,
        "type": "ordinal",
        "sort": None,
        "title": title,
        "axis": {"labelAngle": 0},
        "scale": {"type": "point", "padding": 0.5},
    }


def _with_two(values: Values, name: str) -> Values:
    """Return the values of series that have more than one place."""
    places: dict[str, set[Any]] = {}
    for value in values:
        places.setdefault(value["series"], set()).add(value[name])
    return [value for value in values if len(places[value["series"]]) > 1]
