"""The collectives of an engine's step by phase, from its counters, its timeline and its units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from zerobench.strategies.traffic import Collective, TrafficClock

Span = tuple[str, str, str, int, int]


def engine_collectives(
    traffic: TrafficClock,
    spans: Sequence[Span] | None,
    units: Sequence[Mapping[str, Any]],
    world_size: int,
) -> list[Collective]:
    """Return the collectives of one step. ``spans``: of its timeline; None on GPUs, where the host only enqueues.

    The engine counts bytes, not calls: a call takes one unit, so calls follow from what all units hold together."""
    waited_ms = _waited_ms(traffic, spans) if spans is not None else {}
    found = []
    for (phase, name), count in traffic.counts.items():
        full_bytes, calls = _of_all_units(name, units, world_size)
        found.append(
            Collective(
                phase=phase,
                name=name,
                bytes=count.bytes,
                calls=max(1, round(calls * count.bytes / full_bytes)) if full_bytes else 1,
                ms=waited_ms.get((phase, name), 0.0) if spans is not None else None,
            )
        )
    return found


def _of_all_units(name: str, units: Sequence[Mapping[str, Any]], world_size: int) -> tuple[float, int]:
    """Return the bytes that a rank moves, and its calls, where the collective takes every unit once."""
    key = {"all_gather": "gather_bytes"}.get(name, "gradient_bytes")
    sizes = [unit[key] for unit in units if unit[key]]
    passes = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(name, 0)
    return passes * sum(sizes) * (world_size - 1) / world_size, len(sizes)


def _waited_ms(traffic: TrafficClock, spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    """Return how long the computing thread was in each phase's collectives."""
    waited: dict[tuple[str, str], float] = defaultdict(float)
    for place, what, _, begin_ns, end_ns in spans:
        phase = traffic.phase_at(begin_ns)
        if place == "collectives" and phase is not None:
            waited[phase, _name(what, phase, traffic)] += (end_ns - begin_ns) / 1e6
    return waited


def _name(what: str, phase: str, traffic: TrafficClock) -> str:
    if what.startswith("all-gather"):
        return "all_gather"
    if what.startswith("reduce-scatter"):
        return "reduce_scatter" if (phase, "reduce_scatter") in traffic.counts else "all_reduce"
    return "exchange"
