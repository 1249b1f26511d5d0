"""Phases of a row as shares of its step, and against those of its baseline."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.results.rows import tokens_per_step
from zerobench.results.schema import Row

LEAST_PCT = 1.0  # of the baseline's step: a ratio to a shorter phase is one of noise


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    return next((other for other in rows if other.name == row.baseline), None)


def phases_pct(row: Row) -> dict[str, float]:
    """Share of the profiled step by phase, in per cent; empty where there are no phases."""
    step_ms = sum((row.phases_ms or {}).values())
    return {phase: 100.0 * time_ms / step_ms for phase, time_ms in (row.phases_ms or {}).items() if step_ms}


def phases_change_pct(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """Change of a rank's time per token against the baseline's by phase, in per cent, where both have the phase."""
    base = baseline_of(row, rows)
    if base is None or base.phases_ms is None or row.phases_ms is None:
        return {}
    shares, scale = phases_pct(base), _tokens_of_rank(base) / _tokens_of_rank(row)
    return {
        phase: 100.0 * (scale * time_ms / base.phases_ms[phase] - 1.0)
        for phase, time_ms in row.phases_ms.items()
        if shares.get(phase, 0.0) >= LEAST_PCT
    }


def _tokens_of_rank(row: Row) -> float:
    return tokens_per_step(row) / row.settings.world_size
