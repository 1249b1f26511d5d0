"""A few sentences from the measured rows: what to use, what it costs, and what that rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerobench.report.words import all_ranks_text
from zerobench.results.comparing import plain_twin, plain_twins, same_point
from zerobench.results.rows import (
    NOISE_SIGMAS,
    TOO_NOISY,
    by_workload,
    exceeds_noise,
    fastest,
    has_peak,
    is_ranked,
    may_be_ranked,
    noise,
    row_labels,
    setting_text,
    step_rate,
    ties_with_fastest,
    workload_heads,
)
from zerobench.results.schema import Results, Row
from zerobench.results.settings import Changes, settings_that_change
from zerobench.results.sizes import bytes_text, count_text, join_words, memory_unit, ms_text, rate_text
from zerobench.results.stats import FEWEST_SAMPLES, median, median_error
from zerobench.strategies.catalogue import FLOOR, known_facts

NEAR_FASTEST = 1.10  # memory is worth giving up this much time
NOTABLE_SAVING_PCT = 2.0
WORTH_SHARDING = 0.95  # sharding that leaves more than this of the peak has bought nothing
NOTABLY_SLOWER_GPU_PCT = 2.0
POWER_CAPPED_PCT = 50.0  # of the samples: the cap rather than the work sets the clocks
# What else decides how much memory rows of one workload need.
SHARDING_POINT = settings_that_change(Changes.FLOOR | Changes.STEP | Changes.PLACE)


def advise(results: Results) -> list[str]:
    """Sentences about ok and comparable rows only; several workloads get one text each. At the end what largest setting
    fits, where the comparison was about that or where no row fits."""
    return [*_advice(results), *results.closing]


def _advice(results: Results) -> list[str]:
    workloads = [rows for rows in by_workload(results.rows) if fastest(rows) is not None]
    if not workloads:
        if any(row.status == "ok" and row.comparable and not may_be_ranked(row) for row in results.rows):
            return ["Nothing to recommend: the machine was busy. Measure again once nothing else runs on it."]
        return ["Nothing to recommend: no row is both correct and comparable."]
    texts = [_advise_on(rows) for rows in workloads]
    if len(workloads) == 1:
        return texts[0]
    heads = workload_heads([rows[0] for rows in workloads])
    return [f"{head}: {' '.join(sentences)}" for head, sentences in zip(heads, texts, strict=True)]


def _advise_on(rows: Sequence[Row]) -> list[str]:
    labels = dict(zip((id(row) for row in rows), row_labels(rows), strict=True))
    ranked = [row for row in rows if is_ranked(row)]
    texts = [
        _fastest_text(ranked, labels),
        _memory_text(ranked, labels),
        *_sharding_texts(rows, labels),
        _offload_text(rows, labels),
        _power_text(ranked, labels),
        *_pace_texts(rows),
        _basis_text(ranked),
    ]
    return [text for text in texts if text]


def _time_text(row: Row) -> str:
    rate = step_rate(row)
    assert row.step_time_ms is not None and rate is not None
    return f"{rate_text(rate)} tokens/s ({ms_text(row.step_time_ms.median)} a step)"


def _fastest_text(rows: Sequence[Row], labels: dict[int, str]) -> str:
    best = fastest(rows)
    assert best is not None
    if len(rows) == 1:
        return f"{labels[id(best)]} is the only row that is correct and comparable: {_time_text(best)}."
    apart = [row for row in rows if _is_apart(row, best)]
    if apart:
        names = join_words([labels[id(row)] for row in apart])
        kept = [row for row in rows if row not in apart]
        verb = "was" if len(apart) == 1 else "were"
        return f"{_fastest_text(kept, labels)} {names} {verb} measured in passes, too few to rank."
    tied = _tied_with(best, rows)
    if _noise_unknown(best, rows):
        fewest = min(len(row.step_time_ms.samples) for row in rows if row.step_time_ms is not None)
        what, cure = "measured step", "--num-steps"
        if best.turns is not None:
            what, cure = "window", "--rounds" if best.turns.how == "in turn" else "--repeats"
        steps = f"1 {what} tells" if fewest == 1 else f"{fewest} {what}s tell"
        return (
            f"{labels[id(best)]} took the least time of {len(rows)} correct rows, {_time_text(best)}; {steps} too "
            f"little of the noise to call it the fastest: measure {FEWEST_SAMPLES} or more ({cure})."
        )
    if not tied:
        return f"{labels[id(best)]} is the fastest of {len(rows)} correct rows: {_time_text(best)}."
    names = join_words([labels[id(row)] for row in (best, *tied)])
    found = sorted(rate for row in (best, *tied) if (rate := step_rate(row)) is not None)
    rates = f"{rate_text(found[0])} to {rate_text(found[-1])} tokens/s"
    if _too_noisy(tied):
        error_pct = 100.0 * max(noise(row) or 0.0 for row in tied)
        return (
            f"Too noisy to rank: {names} may each be the fastest of {len(rows)} correct rows, {rates} with errors "
            f"of up to {error_pct:.0f} %; measure more {_more_text(best)}, on a quieter machine."
        )
    return f"{names} tie as the fastest of {len(rows)} correct rows, {rates}: their differences are below the noise."


def _more_text(best: Row) -> str:
    if best.turns is None:
        return "steps (--num-steps)"
    return "rounds (--rounds)" if best.turns.how == "in turn" else "runs (--repeats)"


def _tied_with(best: Row, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row is not best and ties_with_fastest(row)]


def _noise_unknown(best: Row, rows: Sequence[Row]) -> bool:
    """With too few steps to tell noise from difference."""
    return any(noise(row) is None for row in rows if row is not best and not _is_apart(row, best))


def _is_apart(row: Row, best: Row) -> bool:
    """Whether the row was measured in too few passes to be ranked with rows that took turns."""
    in_turn = best.turns is not None and best.turns.how == "in turn"
    return in_turn and row.turns is not None and row.turns.how == "passes" and noise(row) is None


def _too_noisy(tied: Sequence[Row]) -> bool:
    return any((noise(row) or 0.0) >= TOO_NOISY for row in tied)


def _memory_text(rows: Sequence[Row], labels: dict[int, str]) -> str:
    best = fastest(rows)
    assert best is not None
    near = [
        row for row in rows if has_peak(row) and row.relative is not None and row.relative <= NEAR_FASTEST
    ]
    unclear = _noise_unknown(best, rows) or _too_noisy(_tied_with(best, rows))
    if not near or len(rows) == 1 or unclear:
        return ""
    least = min(near, key=lambda row: (row.peak_device_bytes or 0, row.relative or 0.0, row.name))
    if not best.peak_device_bytes or not least.peak_device_bytes or least.relative is None:
        return ""
    saved = 100.0 * (1.0 - least.peak_device_bytes / best.peak_device_bytes)
    if saved < NOTABLE_SAVING_PCT:
        peak = bytes_text(best.peak_device_bytes)
        return f"No row within 10 % of {labels[id(best)]} needs notably less memory than its {peak} peak."
    slower = 100.0 * (least.relative - 1.0)
    more = f"{slower:.0f} %" if slower >= 0.5 else "less than 1 %"
    cost = "at the same speed within noise" if ties_with_fastest(least) else f"for {more} more time"
    peak = f"{bytes_text(least.peak_device_bytes)} peak, {saved:.0f} % below {labels[id(best)]}"
    return f"Within 10 % of the fastest, {labels[id(least)]} needs the least memory: {peak}, {cost}."


def _sharding_texts(rows: Sequence[Row], labels: dict[int, str]) -> list[str]:
    """Where spreading buys nothing, a tool should say so unprompted."""
    ranked = [row for row in rows if is_ranked(row)]
    spread = [row for row in ranked if row.settings.world_size > 1]
    if any(map(_is_sharded, ranked)) and all(row.settings.world_size == 1 for row in rows):
        return ["All rows ran on one rank: there is nothing to shard, so no ZeRO stage can save memory here."]
    texts = [_little_saved_text(rows, labels)]
    alone = fastest([row for row in ranked if row.settings.world_size == 1 and _has_its_like(row, spread)])
    together = fastest(spread)
    if alone is not None and together is not None and _is_faster(alone, together):
        texts.append(
            f"More ranks buy no speed here: {labels[id(alone)]} on one rank processes at least as many tokens/s as "
            f"{labels[id(together)]} on {together.settings.world_size}."
        )
    return texts


def _is_sharded(row: Row) -> bool:
    """False of a strategy of one's own: a row does not tell whether it shards."""
    return known_facts(row.strategy).shards


def _is_replicated(row: Row) -> bool:
    return known_facts(row.strategy).replicates


def _has_its_like(row: Row, others: Sequence[Row]) -> bool:
    """One of as much work, that would be the faster for being of more ranks."""
    return any(same_point(row, other) and row.settings.compile == other.settings.compile for other in others)


def _little_saved_text(rows: Sequence[Row], labels: dict[int, str]) -> str:
    """Where the smallest sharded row saves next to nothing, whatever else was chosen alike for it and a replicated one;
    not where that one needs more than there is."""
    points: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.settings.world_size > 1 and row.strategy != FLOOR:
            points.setdefault(tuple(getattr(row.settings, key) for key in SHARDING_POINT), []).append(row)
    pairs = []
    for found in points.values():
        sharded = _smallest([row for row in found if _is_sharded(row)])
        replicated = _smallest([row for row in found if _is_replicated(row)])
        if sharded is not None and any(row.status == "oom" for row in found if _is_replicated(row)):
            return ""
        if sharded is not None and replicated is not None:
            pairs.append((_peak(sharded) / _peak(replicated), sharded, replicated))
    if not pairs:
        return ""
    share, least, plain = min(pairs, key=lambda pair: pair[0])
    if share <= WORTH_SHARDING:
        return ""
    unit, size = memory_unit([plain.peak_device_bytes])
    return (
        f"Sharding buys little memory here: {labels[id(least)]} peaks at {_peak(least) / size:,.1f} {unit}, "
        f"{labels[id(plain)]} at {_peak(plain) / size:,.1f}; what is sharded is little beside what is not."
    )


def _smallest(rows: Sequence[Row]) -> Row | None:
    """Of the ranked ones."""
    measured = [row for row in rows if is_ranked(row) and has_peak(row)]
    return min(measured, key=lambda row: (_peak(row), row.name), default=None)


def _peak(row: Row) -> int:
    assert row.peak_device_bytes
    return row.peak_device_bytes


def _is_faster(row: Row, other: Row) -> bool:
    """By more than the noise of both."""
    rate, other_rate = step_rate(row), step_rate(other)
    assert rate is not None and other_rate is not None
    return rate > other_rate and exceeds_noise(rate / other_rate, row, other)


def _offload_text(rows: Sequence[Row], labels: dict[int, str]) -> str:
    """What the smallest offloaded row saves and costs against itself without offload; or that nothing else fits."""
    moved = [row for row in rows if is_ranked(row) and row.settings.offload != "none" and has_peak(row)]
    if not moved:
        return ""
    least = min(moved, key=lambda row: (row.peak_device_bytes or 0, row.relative or 0.0, row.name))
    assert least.peak_device_bytes and least.step_time_ms
    peak = bytes_text(least.peak_device_bytes)
    kept = plain_twin(least, rows)
    if kept is None:
        refused = [row.status == "oom" for row in plain_twins(least, rows)]
        if refused and all(refused):
            return f"{labels[id(least)]} fits, with a peak of {peak}, where {least.strategy} without offload does not."
        return ""
    if not kept.peak_device_bytes or not has_peak(kept) or not kept.step_time_ms or not is_ranked(kept):
        return ""
    saved = 100.0 * (1.0 - least.peak_device_bytes / kept.peak_device_bytes)
    times = least.step_time_ms.median / kept.step_time_ms.median
    if saved < NOTABLE_SAVING_PCT:
        return (
            f"{labels[id(least)]} peaks at {peak} and takes {times:.1f} times the step time of {labels[id(kept)]}, "
            f"which peaks at {bytes_text(kept.peak_device_bytes)}: offload saves no notable amount of device memory "
            "here."
        )
    return (
        f"{labels[id(least)]} peaks at {peak}, {saved:.0f} % below {labels[id(kept)]}, for {times:.1f} times the "
        "latter's step time."
    )


def _power_text(rows: Sequence[Row], labels: dict[int, str]) -> str:
    """Where the power cap sets the pace of all fast rows: what their times compare."""
    fast = [row for row in rows if row.relative is not None and row.relative <= NEAR_FASTEST]
    shares = [
        row.sampled.power_cap_pct for row in fast if row.sampled and row.sampled.power_cap_pct is not None
    ]
    if not shares or len(shares) < len(fast) or min(shares) < POWER_CAPPED_PCT:
        return ""
    who = labels[id(fast[0])] if len(fast) == 1 else f"All {len(fast)} rows within 10 % of the fastest"
    texts = [f"in {_range_text(shares)} % of the samples"]
    watts = [row.sampled.power_w for row in fast if row.sampled and row.sampled.power_w is not None]
    energies = [row.tokens_per_j for row in fast if row.tokens_per_j is not None]
    if watts:
        texts.append(f"{_range_text(watts)} W a GPU")
    if energies:
        texts.append(f"{_range_text(energies, decimals=2)} tokens a joule")
    return (
        f"{who} ran at the GPUs' power cap ({', '.join(texts)}): step times there follow the energy that a step takes, "
        "so what moves or computes less is faster, and communication costs time even where it is hidden."
    )


def _pace_texts(rows: Sequence[Row]) -> list[str]:
    """GPUs that do the same work at different speeds, nothing between them: ranks that meet go as the slowest."""
    texts = []
    for row in rows:
        times = row.rank_step_times_ms or []
        if row.strategy != FLOOR or row.settings.device != "cuda" or row.status != "ok" or len(times) < 2:
            continue
        if row.step_time_ms is None:
            continue
        slowest, fastest_ms = max(times), min(times)
        slower_pct = 100.0 * (slowest / fastest_ms - 1.0)
        if slower_pct >= NOTABLY_SLOWER_GPU_PCT and math.log(slowest / fastest_ms) > _pace_noise(row):
            texts.append(
                f"The GPU of rank {times.index(slowest)} is the slowest of {len(times)}: with nothing between them it "
                f"takes {slower_pct:.1f} % longer for forward and backward than that of rank "
                f"{times.index(fastest_ms)}. Ranks that meet go as the slowest one does."
            )
    return texts


def _pace_noise(row: Row) -> float:
    """What a ratio of two ranks' medians may be off by, in logarithms: of a rank the median alone is known, so the
    row's own steps, which are the slowest rank's, stand for the spread of each."""
    assert row.step_time_ms is not None
    error = median_error(
        row.step_time_ms.samples[: row.settings.num_steps]
    )  # ranks' medians are of the first repeat
    return math.inf if error is None else NOISE_SIGMAS * math.sqrt(2.0) * error / row.step_time_ms.median


def _range_text(values: Sequence[float], *, decimals: int = 0) -> str:
    low, high = f"{min(values):.{decimals}f}", f"{max(values):.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def _basis_text(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    parts = [settings.model]
    if settings.parameter_count is not None:
        parts[0] += f" ({count_text(settings.parameter_count)} parameters)"
    parts += [all_ranks_text(rows), settings.precision]
    batches = [setting_text(size) for size in sorted({row.settings.batch_size for row in rows})]
    parts.append(f"batch {join_words(batches)} x sequence {settings.seq_length}")
    times = [row.step_time_ms for row in rows if row.step_time_ms is not None]
    fewest, most = min(len(time.samples) for time in times), max(len(time.samples) for time in times)
    steps = str(fewest) if fewest == most else f"{fewest} to {most}"
    spreads = [100.0 * time.mad / time.median for time in times if len(time.samples) >= FEWEST_SAMPLES]
    spread = f", MAD {median(spreads):.1f} % of the median" if spreads else ""
    rows_text = f"{len(rows)} row{'s' if len(rows) != 1 else ''}"
    what = "measured step" if any(row.turns is None for row in rows) else "window"
    return (
        f"Based on {rows_text}: {', '.join(parts)}; {steps} {what}{'s' if most != 1 else ''} a row{spread}."
    )
