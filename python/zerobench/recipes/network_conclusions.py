"""Sentences on strategies over networks: which wins where, where they break even, and how far the model is off."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.report.network_bounds import baseline_case, break_even_text
from zerobench.report.network_facts import network_of
from zerobench.report.network_predictions import Case, cases, errors, predictions
from zerobench.report.network_report import BASELINE
from zerobench.results.comparing import time_ratio
from zerobench.results.rows import step_rate, tokens_per_step
from zerobench.results.schema import Results, Row


def network_winners(results: Results) -> list[str]:
    """Return the fastest strategy by model and network, and how the others compare with plain data parallelism."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for case in cases(results.rows):
        for row in case.rows:
            groups.setdefault((case.settings.model, case.work, network_of(row)), []).append(row)
    return [
        _winner_text(model, network, rows)
        for (model, _, network), rows in groups.items()
        if len({row.strategy for row in rows}) > 1
    ]


def _winner_text(model: str, network: str, rows: Sequence[Row]) -> str:
    by_speed = sorted(rows, key=lambda row: -(step_rate(row) or 0.0))
    base = next((row for row in rows if row.strategy == BASELINE), None)
    if base is None:
        return f"{model} at {network}: {by_speed[0].strategy} is the fastest of {len(rows)}."
    # Ratios within rounds, where rows took turns, may order rows otherwise than medians do.
    times = sorted(((row.strategy, speed_ratio(row, base)) for row in rows), key=lambda each: -each[1])
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in times[1:])
    first, ratio = times[0]
    lead = f" with {ratio:.2f} times the speed of {BASELINE}" if first != BASELINE else ""
    return f"{model} at {network}: {first} is the fastest{lead}; {others}."


def speed_ratio(row: Row, base: Row) -> float:
    """Return the row's tokens a second over those of ``base``."""
    return 1.0 if row is base else time_ratio(base, row) * tokens_per_step(row) / tokens_per_step(base)


def network_break_even(results: Results) -> list[str]:
    """Return at which bandwidth each strategy breaks even with plain data parallelism, where slow networks tell."""
    found = cases(results.rows)
    texts = []
    for case in found:
        base = baseline_case(found, case, BASELINE)
        if base is not None and base is not case and _has_slow_row(case) and _has_slow_row(base):
            texts.append(f"{case.settings.model}: {break_even_text(case, base)}")
    return texts


def _has_slow_row(case: Case) -> bool:
    return any(prediction.measured_ms is not None for prediction in predictions(case, hosts=()))


def network_error(results: Results) -> list[str]:
    """Return how far the model of step times is off on the rows over slow networks."""
    found = errors(one for case in cases(results.rows) for one in predictions(case, hosts=()))
    if found is None:
        return []
    return [
        f"The model of step times over networks is off by {100 * found[0]:.0f} % in the median and "
        f"{100 * found[1]:.0f} % at worst, on measured points that it was not fitted to."
    ]
