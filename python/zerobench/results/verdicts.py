"""Verdicts: which row of a workload to take, and what the others are good for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from zerobench.results.rows import fastest, has_peak, is_ranked, step_rate, ties_with_fastest
from zerobench.results.schema import Row
from zerobench.results.settings import Changes, Settings, settings_that_change
from zerobench.results.sizes import GIB
from zerobench.strategies.catalogue import FLOOR, OFFLOADS, PARTS, known_facts

Verdict = Literal["optimal", "works", "unnecessary", "fallback", "does not fit"]

WORKS_WITHIN = 1.10
"""A row works when it takes at most this many times the time of the best one."""
MUCH_FREE = 0.4
"""Saving memory is unnecessary where the best row leaves at least this share of the device free."""
# Rows with equal values do the same work, so that one of them can stand in for another.
_SAME_WORK = ("world_size", "batch_size", "grad_accum", *settings_that_change(Changes.WORK))


def verdicts(
    rows: Sequence[Row], machine: dict[str, Any], *, memory_limit_bytes: int | None = None
) -> list[Verdict | None]:
    """Return the verdict on each row of one workload, or None for a row that has none.

    Call it once ``relative`` is filled. ``machine`` is that of the results: it tells how much memory a device has.
    ``memory_limit_bytes`` is the most that a rank may use of its device: rows with a higher peak do not fit."""
    fitting = [row for row in rows if is_ranked(row) and _fits(row, memory_limit_bytes)]
    leader = fastest(rows)
    best = _best(fitting, leader)
    found: list[Verdict | None] = []
    for row in rows:
        if row.strategy != FLOOR and not _fits(row, memory_limit_bytes):
            found.append("does not fit")
        elif best is None or not is_ranked(row):
            found.append(None)
        elif row is best:
            found.append("optimal" if leader and _fits(leader, memory_limit_bytes) else "fallback")
        elif _is_fallback(row, rows, memory_limit_bytes):
            found.append("fallback")
        elif _rate(best) <= WORKS_WITHIN * _rate(row):
            found.append("works")
        else:
            free_bytes = device_bytes(best, machine, memory_limit_bytes)
            found.append("unnecessary" if _saves_in_vain(row, best, free_bytes) else None)
    return found


def device_bytes(row: Row, machine: dict[str, Any], memory_limit_bytes: int | None = None) -> int | None:
    """Return how much memory a rank of the row had on its device, or None where the results do not tell.

    CPU ranks share the machine's memory evenly."""
    settings, known = row.settings, []
    if memory_limit_bytes is not None:
        known.append(memory_limit_bytes)
    if settings.device_memory_gib is not None:
        known.append(int(settings.device_memory_gib * GIB))
    if settings.device == "cuda":
        gpus = [gpu for gpu in machine.get("gpus") or [] if isinstance(gpu, dict)]
        known += [gpu["total_bytes"] for gpu in gpus[: settings.world_size] if gpu.get("total_bytes")]
    elif machine.get("memory_bytes"):
        known.append(machine["memory_bytes"] // settings.world_size)
    return min(known, default=None)


def limit_bytes_of(settings: Settings) -> int | None:
    """Return the peak from which on a row counts as one that does not fit, or None."""
    return None if settings.memory_limit_gib is None else int(settings.memory_limit_gib * GIB)


def is_within_limit(peak_bytes: int | None, settings: Settings) -> bool:
    """Return whether a peak is within --memory-limit."""
    limit = limit_bytes_of(settings)
    return limit is None or (peak_bytes or 0) <= limit


def _fits(row: Row, memory_limit_bytes: int | None) -> bool:
    """Return whether nothing shows that the row needs more memory than there is."""
    above = memory_limit_bytes is not None and (row.peak_device_bytes or 0) > memory_limit_bytes
    return row.status != "oom" and not (row.status == "ok" and above)


def _best(fitting: Sequence[Row], leader: Row | None) -> Row | None:
    """Return the fastest row that fits: of those that tie the one that shards least, then offloads least."""
    if leader is None or not any(row is leader for row in fitting):
        return fastest(fitting)
    tied = [row for row in fitting if row is leader or ties_with_fastest(row)]
    return min(tied, key=lambda row: (*_kept_off(row), row.name))


def _is_fallback(row: Row, rows: Sequence[Row], memory_limit_bytes: int | None) -> bool:
    """Return whether no faster row with the same work fits, and at least one does not fit that is faster or would be.

    A row that ran out of memory has no time. It counts as faster when it shards and offloads no more.
    """
    alike = [other for other in rows if other.strategy != FLOOR and _work(other) == _work(row)]
    too_large = [other for other in alike if not _fits(other, memory_limit_bytes)]
    rivals = [other for other in alike if is_ranked(other) and _rate(other) > _rate(row)]
    if any(_fits(other, memory_limit_bytes) for other in rivals):
        return False
    return bool(rivals) or any(
        other.status == "oom" and _kept_off(other) <= _kept_off(row) for other in too_large
    )


def _saves_in_vain(row: Row, best: Row, free_of_bytes: int | None) -> bool:
    """Return whether the row saves memory, at the cost of time, that the best row leaves free anyway."""
    if free_of_bytes is None or not (has_peak(row) and has_peak(best)):
        return False
    assert row.peak_device_bytes and best.peak_device_bytes
    saves = row.peak_device_bytes < best.peak_device_bytes
    return saves and best.peak_device_bytes <= (1 - MUCH_FREE) * free_of_bytes


def _work(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row.settings, key) for key in _SAME_WORK)


def _kept_off(row: Row) -> tuple[int, int]:
    """Return how much of the state a rank does not hold on its device: by sharding, then by offload."""
    facts = known_facts(row.strategy)
    divided = [facts.divides(part) for part in PARTS]
    stage = row.stage if row.stage is not None else sum(part is not False for part in divided)
    offload = row.settings.offload
    return stage, OFFLOADS.index(offload) if offload in OFFLOADS else len(OFFLOADS)


def _rate(row: Row) -> float:
    return step_rate(row) or 0.0
