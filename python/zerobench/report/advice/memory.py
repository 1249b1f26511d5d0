"""Conditions of advice on memory: what less of it costs, by a smaller row or by offload."""

from __future__ import annotations

from zerobench.report.advice.fastest import order_unclear
from zerobench.report.advice.rule import Scene, Words
from zerobench.results.comparing import plain_twin, plain_twins
from zerobench.results.rows import fastest, has_peak, is_ranked, ties_with_fastest
from zerobench.results.schema import Row
from zerobench.results.sizes import bytes_text
from zerobench.results.verdicts import WORKS_WITHIN

NOTABLE_SAVING_PCT = 2.0


def less_memory(scene: Scene) -> list[Words]:
    found = _near_fastest(scene)
    if found is None:
        return []
    best, least = found
    saved = 100.0 * (1.0 - peak(least) / peak(best))
    if saved < NOTABLE_SAVING_PCT:
        return []
    slower = 100.0 * ((least.relative or 1.0) - 1.0)
    more = f"{slower:.0f} %" if slower >= 0.5 else "less than 1 %"
    return [
        {
            "least": scene.label(least),
            "best": scene.label(best),
            "peak": bytes_text(peak(least)),
            "saved": f"{saved:.0f} %",
            "cost": "at the same speed within noise" if ties_with_fastest(least) else f"for {more} more time",
        }
    ]


def no_less_memory(scene: Scene) -> list[Words]:
    found = _near_fastest(scene)
    if found is None or less_memory(scene):
        return []
    return [{"best": scene.label(found[0]), "peak": bytes_text(peak(found[0]))}]


def _near_fastest(scene: Scene) -> tuple[Row, Row] | None:
    """Return the fastest row and the smallest one near it, or None where nothing can be said of the two."""
    rows = scene.ranked
    best = fastest(rows)
    assert best is not None
    near = [
        row for row in rows if has_peak(row) and row.relative is not None and row.relative <= WORKS_WITHIN
    ]
    if not near or len(rows) == 1 or order_unclear(scene):
        return None
    least = min(near, key=lambda row: (peak(row), row.relative or 0.0, row.name))
    return (best, least) if best.peak_device_bytes else None


def only_offload_fits(scene: Scene) -> list[Words]:
    least = smallest_offloaded(scene)
    if least is None or plain_twin(least, scene.rows) is not None:
        return []
    refused = [row.status == "oom" for row in plain_twins(least, scene.rows)]
    if not refused or not all(refused):
        return []
    return [{"least": scene.label(least), "peak": bytes_text(peak(least)), "strategy": least.strategy}]


def offload_saves(scene: Scene) -> list[Words]:
    return [words for words, saved in _offload_pair(scene) if saved >= NOTABLE_SAVING_PCT]


def offload_saves_nothing(scene: Scene) -> list[Words]:
    return [words for words, saved in _offload_pair(scene) if saved < NOTABLE_SAVING_PCT]


def _offload_pair(scene: Scene) -> list[tuple[Words, float]]:
    """Return the words on the smallest offloaded row next to itself without offload, and the per cent that it saves."""
    least = smallest_offloaded(scene)
    kept = plain_twin(least, scene.rows) if least is not None else None
    if least is None or kept is None or not has_peak(kept) or not is_ranked(kept):
        return []
    assert least.step_time_ms is not None and kept.step_time_ms is not None
    saved = 100.0 * (1.0 - peak(least) / peak(kept))
    words = {
        "least": scene.label(least),
        "kept": scene.label(kept),
        "peak": bytes_text(peak(least)),
        "kept_peak": bytes_text(peak(kept)),
        "saved": f"{saved:.0f} %",
        "times": f"{least.step_time_ms.median / kept.step_time_ms.median:.1f}",
    }
    return [(words, saved)]


def smallest_offloaded(scene: Scene) -> Row | None:
    """Return the ranked row with offload that peaks lowest."""
    moved = [row for row in scene.ranked if row.settings.offload != "none" and has_peak(row)]
    return min(moved, key=lambda row: (peak(row), row.relative or 0.0, row.name), default=None)


def peak(row: Row) -> int:
    assert row.peak_device_bytes
    return row.peak_device_bytes
