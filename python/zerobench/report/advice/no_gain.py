"""Conditions of advice on where sharding, offload or more ranks gain nothing."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.report.advice.bottleneck import WAIT_SHARE, resource_shares
from zerobench.report.advice.memory import peak
from zerobench.report.advice.rule import Scene, Words
from zerobench.results.comparing import same_point, time_ratio
from zerobench.results.rows import exceeds_noise, fastest, has_peak, is_ranked, step_rate, tokens_per_step
from zerobench.results.schema import Row
from zerobench.results.settings import Changes, settings_that_change
from zerobench.results.sizes import join_words, memory_unit
from zerobench.results.verdicts import device_bytes
from zerobench.strategies.catalogue import FLOOR, known_facts

WORTH_SHARDING = 0.95  # sharding that leaves more than this of the peak has bought nothing
NOTABLY_SLOWER = 1.10  # than with less sharding, from which a slow link is named
MOST_NAMES = 4  # of rows, in one sentence
# What else decides how much memory rows of one workload need.
SHARDING_POINT = settings_that_change(Changes.FLOOR | Changes.STEP | Changes.PLACE)


def one_rank(scene: Scene) -> list[Words]:
    sharded = any(_is_sharded(row) for row in scene.ranked)
    return [{}] if sharded and all(row.settings.world_size == 1 for row in scene.rows) else []


def little_saved(scene: Scene) -> list[Words]:
    """Find where the smallest sharded row saves next to nothing compared with a replicated one that is otherwise
    alike. Says nothing where a replicated row runs out of memory."""
    points: dict[tuple[object, ...], list[Row]] = {}
    for row in scene.rows:
        if row.settings.world_size > 1 and row.strategy != FLOOR:
            points.setdefault(tuple(getattr(row.settings, key) for key in SHARDING_POINT), []).append(row)
    pairs = []
    for found in points.values():
        sharded = _smallest([row for row in found if _is_sharded(row)])
        replicated = _smallest([row for row in found if _is_replicated(row)])
        if sharded is not None and any(row.status == "oom" for row in found if _is_replicated(row)):
            return []
        if sharded is not None and replicated is not None:
            pairs.append((peak(sharded) / peak(replicated), sharded, replicated))
    if not pairs:
        return []
    share, least, plain = min(pairs, key=lambda pair: pair[0])
    if share <= WORTH_SHARDING:
        return []
    unit, size = memory_unit([plain.peak_device_bytes])
    return [
        {
            "least": scene.label(least),
            "plain": scene.label(plain),
            "least_peak": f"{peak(least) / size:,.1f} {unit}",
            "plain_peak": f"{peak(plain) / size:,.1f}",
        }
    ]


def ranks_gain_nothing(scene: Scene) -> list[Words]:
    spread = [row for row in scene.ranked if row.settings.world_size > 1]
    alone = fastest(
        [row for row in scene.ranked if row.settings.world_size == 1 and _has_its_like(row, spread)]
    )
    together = fastest(spread)
    if alone is None or together is None or not _is_faster(alone, together):
        return []
    return [
        {
            "alone": scene.label(alone),
            "together": scene.label(together),
            "ranks": str(together.settings.world_size),
        }
    ]


def memory_to_spare(scene: Scene) -> list[Words]:
    """Find rows whose verdict is that they save memory which the best row leaves free anyway."""
    best = next((row for row in scene.rows if row.verdict == "optimal"), None)
    saving = [row for row in scene.rows if row.verdict == "unnecessary"]
    total = device_bytes(best, scene.machine) if best is not None else None
    if best is None or not saving or not total:
        return []
    names = [scene.label(row) for row in saving]
    more = len(names) - MOST_NAMES
    if more > 0:
        names = [*names[:MOST_NAMES], f"{more} more"]
    return [
        {
            "names": join_words(names),
            "save": "save" if len(saving) > 1 else "saves",
            "best": scene.label(best),
            "free": f"{100.0 * (1.0 - peak(best) / total):.0f} %",
        }
    ]


def link_too_slow(scene: Scene) -> list[Words]:
    """Find the sharded row that loses most time to communication, compared with one that shards less. Only the
    fastest row of a stage counts: a slower one may wait for other reasons than the link."""
    found = []
    for row in scene.ranked:
        share = resource_shares(row).get("network", 0.0)
        for other in scene.ranked:
            if share < WAIT_SHARE or not _leads_its_stage(row, scene.ranked):
                continue
            if not _shards_less(other, row) or not _works_alike(row, other):
                continue
            slower = time_ratio(row, other)
            if slower >= NOTABLY_SLOWER and exceeds_noise(slower, row, other):
                found.append((slower, scene.label(row), share, scene.label(other)))
    if not found:
        return []
    slower, row_label, share, other_label = max(found)
    return [
        {"row": row_label, "other": other_label, "share": f"{100 * share:.0f} %", "times": f"{slower:.1f}"}
    ]


def _leads_its_stage(row: Row, rows: Sequence[Row]) -> bool:
    alike = [other for other in rows if _stage(other) == _stage(row) and _works_alike(row, other)]
    return fastest(alike) is row


def _shards_less(row: Row, other: Row) -> bool:
    stages = [_stage(row), _stage(other)]
    return None not in stages and stages[0] < stages[1]  # type: ignore[operator]


def _stage(row: Row) -> int | None:
    return 0 if row.stage is None and _is_replicated(row) else row.stage


def _works_alike(row: Row, other: Row) -> bool:
    return tokens_per_step(row) == tokens_per_step(other) and all(
        getattr(row.settings, key) == getattr(other.settings, key) for key in SHARDING_POINT
    )


def disk_untouched(scene: Scene) -> list[Words]:
    idle = [
        row
        for row in scene.ranked
        if row.settings.offload.startswith("nvme")
        and row.transfers is not None
        and (row.transfers.nvme_read_bytes, row.transfers.nvme_written_bytes) == (0, 0)
    ]
    return [{"names": join_words([scene.label(row) for row in idle])}] if idle else []


def _is_sharded(row: Row) -> bool:
    """Return False for a strategy of one's own: a row does not tell whether it shards."""
    return known_facts(row.strategy).shards


def _is_replicated(row: Row) -> bool:
    return known_facts(row.strategy).replicates


def _has_its_like(row: Row, others: Sequence[Row]) -> bool:
    """Return whether a row of as much work should be faster because it has more ranks."""
    return any(same_point(row, other) and row.settings.compile == other.settings.compile for other in others)


def _smallest(rows: Sequence[Row]) -> Row | None:
    measured = [row for row in rows if is_ranked(row) and has_peak(row)]
    return min(measured, key=lambda row: (peak(row), row.name), default=None)


def _is_faster(row: Row, other: Row) -> bool:
    """Return whether it is faster by more than the noise of both."""
    rate, other_rate = step_rate(row), step_rate(other)
    assert rate is not None and other_rate is not None
    return rate > other_rate and exceeds_noise(rate / other_rate, row, other)
