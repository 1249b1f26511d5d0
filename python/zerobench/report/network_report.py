"""The report of a network as data and as lines: what `zerobench network` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zerobench.report.network_bounds import (
    SMALL_MESSAGE,
    bandwidth_text,
    baseline_case,
    bottleneck,
    break_even_text,
)
from zerobench.report.network_facts import (
    collectives_of,
    effective_bandwidth,
    network_of,
    network_share,
)
from zerobench.report.network_predictions import (
    HOSTS,
    Case,
    Prediction,
    break_even,
    cases,
    errors,
    predictions,
)
from zerobench.report.phases import phases_change_pct
from zerobench.results.rows import row_labels
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import bytes_text
from zerobench.strategies.catalogue import DEFAULT_BASELINES

BASELINE = DEFAULT_BASELINES[0]


def network_report(
    results: Results, *, hosts: Sequence[int] = HOSTS, networks: Sequence[str] = (), baseline: str = BASELINE
) -> dict[str, Any]:
    """Return rows, strategies and the model's error. ``networks``: further ones to predict step times over."""
    found = cases(results.rows)
    predicted = [predictions(case, hosts=hosts, networks=networks) for case in found]
    labels = row_labels([case.rows[0] for case in found])
    error = errors(one for each in predicted for one in each)
    return {
        "rows": [_row(row, case, results.rows) for case in found for row in case.rows],
        "strategies": [
            {"label": label, **_strategy(case, each, found, baseline)}
            for label, case, each in zip(labels, found, predicted, strict=True)
        ],
        "model_error": {"median": error[0], "worst": error[1], "points": _point_num(predicted)}
        if error
        else None,
    }


def _point_num(predicted: Iterable[Iterable[Prediction]]) -> int:
    return sum(one.error is not None for each in predicted for one in each)


def _row(row: Row, case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    bound = bottleneck(row, case.costs.on_hosts(row.settings.world_size))
    return {
        "name": row.name,
        "strategy": row.strategy,
        "model": row.settings.model,
        "network": network_of(row),
        "network_how": row.network_how,
        "step_ms": row.step_time_ms.median if row.step_time_ms is not None else None,
        "network_share": network_share(row),
        "collectives": [
            {**one.model_dump(), "bytes_per_s": effective_bandwidth(one)} for one in collectives_of(row)
        ],
        "phases_change_pct": phases_change_pct(row, rows),
        "bound": bound.bound if bound else None,
        "bottleneck": bound.sentence if bound else None,
    }


def _strategy(
    case: Case, predicted: Sequence[Prediction], found: Sequence[Case], baseline: str
) -> dict[str, Any]:
    costs = case.costs
    base = baseline_case(found, case, baseline)
    compares = base is not None and base is not case
    return {
        "strategy": case.strategy,
        "model": case.settings.model,
        "hosts": costs.hosts,
        "compute_ms": costs.compute_ms,
        "native_ms": costs.native_ms,
        "overlap_ms": costs.overlap_ms,
        "bytes": round(costs.bytes),
        "rounds": costs.rounds,
        "break_even_bytes_per_s": break_even(costs, base.costs) if compares and base else None,
        "break_even": break_even_text(case, base) if compares and base else None,
        "predictions": [
            {
                "network": one.network,
                "hosts": one.hosts,
                "predicted_ms": one.predicted_ms,
                "measured_ms": one.measured_ms,
                "unseen_ms": one.unseen_ms,
                "error": one.error,
            }
            for one in predicted
        ],
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the report as text, in sections that begin with a heading."""
    if not report["rows"]:
        return ["no row on two ranks or more is ok, so there is no network to report"]
    lines = ["bytes of a step by phase and collective"]
    for row in report["rows"]:
        lines += _row_lines(row)
    lines += ["", "what bounds each row"]
    lines += _by_model(report["rows"], "bottleneck")
    compared = _by_model(report["strategies"], "break_even")
    if compared:
        lines += ["", "where strategies break even", *compared]
    return [*lines, *_prediction_lines(report["strategies"]), *_error_lines(report["model_error"])]


def _by_model(found: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Return sentences, with the model in front where there are several."""
    several = len({one["model"] for one in found}) > 1
    return [f"  {one['model']}: {one[key]}" if several else f"  {one[key]}" for one in found if one[key]]


def _row_lines(row: dict[str, Any]) -> list[str]:
    head = f"  {row['name']}: {row['network']}"
    head += f" ({row['network_how']})" if row["network_how"] else ""
    if row["network_share"] is not None:
        head += f", {100 * row['network_share']:.0f} % of the step in the network"
    lines = [head]
    for one in row["collectives"]:
        calls = f" in {one['calls']} call{'s' if one['calls'] != 1 else ''}" if one["calls"] else ""
        tells = one["bytes_per_s"] and one["bytes"] >= SMALL_MESSAGE  # else it tells of waiting alone
        rate = f", {bandwidth_text(one['bytes_per_s'])}" if tells else ""
        lines.append(f"    {one['phase']:9}  {one['name']:14}  {bytes_text(one['bytes'])}{calls}{rate}")
    changes = [f"{phase} {change:+.0f} %" for phase, change in row["phases_change_pct"].items()]
    return [*lines, f"    against the baseline: {', '.join(changes)}"] if changes else lines


def _prediction_lines(strategies: Sequence[dict[str, Any]]) -> list[str]:
    numbers = sorted({one["hosts"] for each in strategies for one in each["predictions"]})
    if not numbers:
        return [
            "",
            "No step time is predicted: rows ran over the machine's own network, whose speed is unknown. Compare over "
            "--network 10gbit,1gbit, or give --at.",
        ]
    lines = ["", "step time in ms by number of hosts, predicted (measured)"]
    heads = {
        (index, one["network"]): f"{each['label']} at {one['network']}"
        for index, each in enumerate(strategies)
        for one in each["predictions"]
    }
    width = max(map(len, heads.values()))
    lines.append(f"  {'':{width}}{''.join(f'{number:>18}' for number in numbers)}")
    for (index, network), head in heads.items():
        found = [one for one in strategies[index]["predictions"] if one["network"] == network]
        known = {one["hosts"]: _cell(one) for one in found}
        cells = [f"{known.get(number, ''):>18}" for number in numbers]
        lines.append(f"  {head:{width}}{''.join(cells)}")
    return lines


def _cell(prediction: dict[str, Any]) -> str:
    text = f"{prediction['predicted_ms']:,.1f}"
    return f"{text} ({prediction['measured_ms']:,.1f})" if prediction["measured_ms"] is not None else text


def _error_lines(error: dict[str, Any] | None) -> list[str]:
    if error is None:
        return []
    return [
        "",
        f"The model's error on {error['points']} measured points, each predicted without itself: median "
        f"{100 * error['median']:.0f} %, worst {100 * error['worst']:.0f} %.",
    ]
