"""The columns that compare rows with each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zerobench.results.rows import (
    GB,
    NOISE_SIGMAS,
    by_workload,
    fastest,
    is_ranked,
    ratio_in_turn,
    saw_all_state,
    step_rate,
    tokens_per_step,
)
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS, Changes, settings_that_change
from zerobench.results.stats import ratio_error
from zerobench.results.verdicts import limit_bytes_of, verdicts
from zerobench.strategies.catalogue import DEFAULT_BASELINES, FLOOR, OURS, known_facts

# Settings in which a row and its baseline must agree, besides batch and world size.
BASELINE_POINT = settings_that_change(Changes.WORK)
# Settings that a row shares with its floor, besides the workload.
FLOOR_POINT = settings_that_change(Changes.FLOOR)
# Settings that an offloaded row shares with the row that it is held against: all but where state is and when it is
# updated, which only offloaded rows may be able to choose.
PLAIN_POINT = settings_that_change(Changes.FLOOR | Changes.STEP)
# Settings that a row shares with itself on fewer ranks.
SCALING_POINT = tuple(
    key
    for key, setting in SETTINGS.items()
    if key != "world_size" and setting.changes and not setting.known_after_run and not setting.follows
)


def _baseline_strategy(rows: Sequence[Row], baseline: str | None) -> str | None:
    """Return the strategy that every row of a workload is compared with, so that one column has one meaning."""
    if baseline is not None:
        return baseline
    present = {row.strategy for row in rows if is_ranked(row)}
    return next((strategy for strategy in DEFAULT_BASELINES if strategy in present), None)


def _find_baseline(row: Row, rows: Sequence[Row], wanted: str | None) -> Row | None:
    """The row that `row` is compared with: the one named `wanted`, or that strategy's at the same settings. A strategy
    that only ever has one rank (`single`) is compared across world sizes where the other side has just one."""
    usable = [other for other in rows if is_ranked(other)]
    named = [other for other in usable if other.name == wanted]
    if named:
        return named[0]
    alike = [other for other in usable if other.strategy == wanted and same_point(row, other)]
    same_size = [other for other in alike if other.settings.world_size == row.settings.world_size]
    if not same_size and any(_only_one_rank(rows, strategy) for strategy in (row.strategy, wanted)):
        same_size = alike if len({other.settings.world_size for other in alike}) == 1 else []
    return min(
        same_size,
        key=lambda other: (
            other.settings.compile != row.settings.compile,
            other.settings.offload not in (row.settings.offload, "none"),
            other.settings.offload != row.settings.offload,
            _batch(other) != _batch(row),
            other.settings.communicator != row.settings.communicator,
            other.settings.optimizer_in_backward != row.settings.optimizer_in_backward,
            other.name,
        ),
        default=None,
    )


def _only_one_rank(rows: Sequence[Row], strategy: str | None) -> bool:
    return all(row.settings.world_size == 1 for row in rows if row.strategy == strategy)


def _batch(row: Row) -> tuple[int, int]:
    return row.settings.batch_size, row.settings.grad_accum


def same_point(row: Row, other: Row) -> bool:
    """Return whether two rows do as much work in a step, on a rank or in all, and clip and checkpoint alike."""
    same_batch = _batch(row) == _batch(other) or tokens_per_step(row) == tokens_per_step(other)
    return same_batch and all(
        getattr(row.settings, key) == getattr(other.settings, key) for key in BASELINE_POINT
    )


def finish_rows(results: Results, baseline: str | None = None) -> None:
    """Fills the columns that compare rows: relative and its uncertainty, speedup, memory change, baseline, the share of
    the floor, how much of the memory is explained, tokens/s per GB of peak, scaling with ranks, and the verdict. Only
    ok rows count. `baseline` names a strategy or a row; by default ddp, else ddp_master, else single.

    May be called after every row; what it fills depends on the set of rows alone, not on their order."""
    for rows in by_workload(results.rows):
        best, wanted = fastest(rows), _baseline_strategy(rows, baseline)
        for row in rows:
            row.relative = row.relative_uncertainty = row.relative_low = row.relative_high = None
            row.speedup = row.memory_change_pct = None
            row.tokens_per_s_per_peak_gb = row.of_compute_only = row.baseline = None
            row.memory_explained_pct = row.offload_practicality = row.scaling_efficiency = None
            rate = step_rate(row)
            if row.status != "ok" or rate is None:
                continue
            if row.peak_device_bytes and saw_all_state(row) and row.strategy != FLOOR:
                row.tokens_per_s_per_peak_gb = rate / (row.peak_device_bytes / GB)
            floor = floor_of(row, rows)
            row.of_compute_only = _share_of_floor(row, floor)
            row.memory_explained_pct = _memory_explained_pct(row, floor)
            row.offload_practicality = _practicality(row, rows)
            if not is_ranked(row) or best is None:
                continue
            _fill_relative(row, best)
            _fill_against_baseline(row, _find_baseline(row, rows, wanted))
            row.scaling_efficiency = _scaling_efficiency(row, rows)
        found = verdicts(rows, results.machine, memory_limit_bytes=_memory_limit_bytes(rows))
        for row, verdict in zip(rows, found, strict=True):
            row.verdict = verdict


def _memory_limit_bytes(rows: Sequence[Row]) -> int | None:
    """Return the --memory-limit of the rows, the least of several, or None."""
    limits = [limit for row in rows if (limit := limit_bytes_of(row.settings)) is not None]
    return min(limits, default=None)


def floor_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the model's own forward and backward at the same settings, on the same ranks if there is one."""
    for floor in sorted(rows, key=lambda floor: floor.settings.world_size != row.settings.world_size):
        if floor.strategy != FLOOR or floor.status != "ok" or floor.step_time_ms is None:
            continue
        if floor.settings.device == "cpu" and floor.settings.world_size != row.settings.world_size:
            continue  # fewer ranks have more of the cores each
        if all(getattr(floor.settings, key) == getattr(row.settings, key) for key in FLOOR_POINT):
            return floor
    return None


def _share_of_floor(row: Row, floor: Row | None) -> float | None:
    """How much of the step is the model's own forward and backward: the floor's step time over this row's."""
    if floor is None or row.strategy == FLOOR:
        return None
    return time_ratio(floor, row)


def _memory_explained_pct(row: Row, floor: Row | None) -> float | None:
    """How much of the peak its categories and the activations that the floor needs add up to."""
    if floor is None or row.strategy == FLOOR:
        return None
    if floor.activation_bytes is None or row.memory_bytes is None or not row.peak_device_bytes:
        return None
    held = dict(row.memory_bytes.get("device", {}))
    beside: float = floor.activation_bytes
    if _makes_gradients_in_backward(row):
        beside = _beside_parameters(row, floor, held.pop("gradients", 0))
    return 100.0 * (sum(held.values()) + beside) / row.peak_device_bytes


def _makes_gradients_in_backward(row: Row) -> bool:
    """Return whether the gradients that updates read live only from backward to their update
    (docs/explain/memory.md)."""
    settings = row.settings
    if settings.grad_accum > 1:
        return False
    if settings.world_size == 1 and settings.device == "cuda":
        return row.strategy in OURS and settings.offload == "none"
    divided = bool(known_facts(row.strategy).divides("gradients"))
    return row.strategy in OURS and divided and settings.world_size > 1


def _beside_parameters(row: Row, floor: Row, gradient_bytes: int) -> float:
    """The peak of activations and so many bytes of gradients, which come as activations go: at most both in full. The
    floor took it with none of them, with a rank's shards and with all, kept from their arrival on; the line that joins
    two of these is an upper bound of what lies between. Files from before the second have the largest only."""
    assert floor.activation_bytes is not None
    held = (floor.memory_bytes or {}).get("device", {})
    both = floor.activation_bytes + gradient_bytes
    if "parameters" not in held or not floor.peak_device_bytes:
        return both
    all_bytes = held.get("gradients", 0)
    with_all = max(floor.activation_bytes, floor.peak_device_bytes - held["parameters"])
    if floor.activation_and_shard_bytes is None:
        return min(both, with_all)
    kept_bytes: float = gradient_bytes
    if row.settings.optimizer_in_backward and row.dtypes and floor.dtypes:
        # Fewer than all shards at once, and never more than if they were kept.
        same_dtype = row.dtypes.reduce == floor.dtypes.reduce
        kept_bytes = all_bytes / row.settings.world_size if same_dtype else all_bytes
    points = [
        (0, floor.activation_bytes),
        (all_bytes / floor.settings.world_size, floor.activation_and_shard_bytes),
        (all_bytes, with_all),
    ]
    for (low, below), (high, above) in pairwise(points):
        if low <= kept_bytes < high:
            return min(both, below + (above - below) * (kept_bytes - low) / (high - low))
    return min(both, with_all)


def plain_twins(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows of the same strategy and settings without offload, whatever became of them. Rows that ran have the same
    communicator."""
    return [
        plain
        for plain in rows
        if plain.strategy == row.strategy
        and plain.settings.offload == "none"
        and all(getattr(plain.settings, key) == getattr(row.settings, key) for key in PLAIN_POINT)
        and (plain.step_time_ms is None or plain.settings.communicator == row.settings.communicator)
    ]


def plain_twin(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row that an offloaded row is compared with, preferably one that updates at the same time."""
    measured = [
        plain for plain in plain_twins(row, rows) if plain.status == "ok" and plain.step_time_ms is not None
    ]
    return min(
        measured,
        key=lambda plain: (
            plain.settings.optimizer_in_backward != row.settings.optimizer_in_backward,
            plain.name,
        ),
        default=None,
    )


def _practicality(row: Row, rows: Sequence[Row]) -> float | None:
    """Step time of the same row without offload over this row's."""
    plain = plain_twin(row, rows) if row.settings.offload != "none" else None
    if plain is None:
        return None
    return time_ratio(plain, row)


def time_ratio(row: Row, other: Row) -> float:
    """Return the row's step time over the other's: of rows that took turns the median of the ratios within rounds, else
    the ratio of the medians."""
    paired = ratio_in_turn(row, other)
    if paired is not None:
        return paired.value
    assert row.step_time_ms is not None and other.step_time_ms is not None
    return row.step_time_ms.median / other.step_time_ms.median


def _scaling_efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    """Tokens/s of a rank over that of the same row on the fewest ranks, where these are fewer than its own."""
    fewer = [
        other
        for other in rows
        if is_ranked(other)
        and other.strategy == row.strategy
        and other.settings.world_size < row.settings.world_size
        and all(getattr(other.settings, key) == getattr(row.settings, key) for key in SCALING_POINT)
    ]
    fewest = min(fewer, key=lambda other: (other.settings.world_size, other.name), default=None)
    if fewest is None:
        return None
    row_rate, fewest_rate = step_rate(row), step_rate(fewest)
    assert row_rate is not None and fewest_rate is not None
    return (row_rate / row.settings.world_size) / (fewest_rate / fewest.settings.world_size)


def _fill_relative(row: Row, best: Row) -> None:
    assert row.step_time_ms is not None and best.step_time_ms is not None
    if row is best:
        row.relative = 1.0
        return
    tokens = tokens_per_step(best) / tokens_per_step(row)
    row.relative = time_ratio(row, best) * tokens
    paired = ratio_in_turn(row, best)
    if paired is not None:
        if paired.low is not None and paired.high is not None:
            row.relative_low, row.relative_high = paired.low * tokens, paired.high * tokens
            row.relative_uncertainty = (row.relative_high - row.relative_low) / (2 * NOISE_SIGMAS)
        return
    error = ratio_error(row.step_time_ms.samples, best.step_time_ms.samples)
    if error is not None:
        of_times = row.step_time_ms.median / best.step_time_ms.median
        row.relative_uncertainty = row.relative * (error / of_times)


def _fill_against_baseline(row: Row, base: Row | None) -> None:
    if base is None:
        return
    row.baseline = base.name
    row.speedup = time_ratio(base, row) * (tokens_per_step(row) / tokens_per_step(base))
    if row.peak_device_bytes and base.peak_device_bytes and saw_all_state(row) and saw_all_state(base):
        row.memory_change_pct = 100.0 * (row.peak_device_bytes / base.peak_device_bytes - 1.0)
