"""Sentences that recipes conclude with. Each function says what the rows support, and nothing where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from zerobench.results.comparing import BASELINE_POINT, plain_twin
from zerobench.results.rows import by_workload, has_peak, is_ranked, step_rate, tokens_per_step
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import bytes_text, join_words, rate_text
from zerobench.strategies.catalogue import FLOOR, OURS

NEAR = 1.10  # saving memory is worth this much time
NOTABLE_SAVING = 0.05  # of the peak, from which a row is said to need less
BENDS_BELOW = 0.80  # of the speed of a rank alone
_TOLD_BY_RUN = tuple(key for key, setting in SETTINGS.items() if setting.known_after_run)


def series(rows: Iterable[Row], *varying: str) -> list[list[Row]]:
    """Return measured rows in groups of one strategy whose settings differ in nothing but ``varying``."""
    groups: dict[str, list[Row]] = {}
    left_out = {*varying, *_TOLD_BY_RUN}
    for row in rows:
        if row.status == "ok" and row.strategy != FLOOR and step_rate(row) is not None:
            kept = {key: value for key, value in row.settings.model_dump().items() if key not in left_out}
            groups.setdefault(repr((row.strategy, sorted(kept.items()))), []).append(row)
    return list(groups.values())


def precision_speed(results: Results) -> list[str]:
    """Return such as "fp16 is 3.1 times fp32 at batch 32, sequence 128"."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for rows in series(results.rows, "precision", "tf32"):
        base = next((row for row in rows if row.settings.precision == "fp32"), None)
        for row in rows:
            if base is not None and row is not base:
                key = (row.settings.precision, row.settings.batch_size, row.settings.seq_length)
                found.setdefault(key, []).append(_rate(row) / _rate(base))
    return [
        f"{precision} is {_times(ratios)} fp32 at batch {batch}, sequence {seq}."
        for (precision, batch, seq), ratios in found.items()
    ]


def compile_speed(results: Results) -> list[str]:
    """Return such as "zero3 compiled by block is 1.2 to 1.4 times eager"."""
    found: dict[tuple[str, str], list[float]] = {}
    for rows in series(results.rows, "compile"):
        base = next((row for row in rows if row.settings.compile == "none"), None)
        for row in rows:
            if base is not None and row is not base:
                found.setdefault((row.strategy, row.settings.compile), []).append(_rate(row) / _rate(base))
    return [
        f"{strategy} with --compile {mode} is {_times(ratios)} eager."
        for (strategy, mode), ratios in found.items()
    ]


def accumulation_speed(results: Results) -> list[str]:
    """Return what accumulation gains in tokens a second, and what it saves on the wire."""
    texts = []
    for rows in series(results.rows, "grad_accum", "batch_size"):
        rows = sorted(rows, key=lambda row: (row.settings.grad_accum, -row.settings.batch_size))
        first, last = rows[0], rows[-1]
        if first.settings.grad_accum == last.settings.grad_accum:
            continue
        text = (
            f"{last.strategy} with accumulation {last.settings.grad_accum} is {_times([_rate(last) / _rate(first)])} "
            f"accumulation {first.settings.grad_accum}"
        )
        if first.communication_bytes and last.communication_bytes:
            wires = [row.communication_bytes / tokens_per_step(row) for row in (first, last)]  # type: ignore[operator]
            text += f", with {wires[1]:,.0f} bytes on the wire a token instead of {wires[0]:,.0f}"
        texts.append(f"{text}.")
    return texts


def offload_cost(results: Results) -> list[str]:
    """Return what each offload costs in time and saves on the device, against the same row without."""
    texts = []
    for row in results.rows:
        plain = (
            plain_twin(row, results.rows) if row.status == "ok" and row.settings.offload != "none" else None
        )
        if plain is None or not has_peak(row) or not has_peak(plain):
            continue
        ratio = _rate(plain) / _rate(row)
        text = f"{row.strategy} with {row.settings.offload} takes {ratio:.1f} times the step time without offload"
        texts.append(f"{text} and {_saving_text(row, plain)}{_tiers_text(row)}.")
    return texts


def largest(results: Results) -> list[str]:
    """Return the largest value that --find found for each row."""
    found = [(row, row.search) for row in results.rows if row.status == "ok" and row.search is not None]
    return [
        f"{_who(row)} fits {search.setting} {search.largest} at most, at {rate_text(_rate(row))} tokens/s."
        for row, search in found
        if search.largest is not None and row.strategy != FLOOR
    ]


def stage_pays(results: Results) -> list[str]:
    """Return at which model a ZeRO stage begins to pay: it saves memory for little time, or the stages below it do not
    fit."""
    found: dict[int, str] = {}
    workloads = sorted(by_workload(results.rows), key=lambda rows: rows[0].settings.parameter_count or 0)
    for rows in workloads:
        stages = [row for row in rows if row.strategy in OURS and row.settings.offload == "none"]
        for row in stages:
            lower = [other for other in stages if other.stage is not None and other.stage < (row.stage or 0)]
            reason = _why_it_pays(row, lower) if row.stage not in found and lower else None
            if reason is not None and row.stage is not None:
                found[row.stage] = f"Stage {row.stage} begins to pay at {row.settings.model}: {reason}."
    return [found[stage] for stage in sorted(found)]


def _why_it_pays(row: Row, lower: Sequence[Row]) -> str | None:
    if not is_ranked(row):
        return None
    if all(other.status == "oom" for other in lower):
        return "the stages below it do not fit"
    rivals = [other for other in lower if is_ranked(other) and has_peak(other) and _does_as_much(row, other)]
    if not rivals or not has_peak(row):
        return None
    least = min(rivals, key=_peak)
    slower = max(_rate(other) for other in rivals) / _rate(row)
    if slower > NEAR or _peak(row) > (1 - NOTABLE_SAVING) * _peak(least):
        return None
    return f"it {_saving_text(row, least)} compared with stage {least.stage}, {_cost_text(slower)}"


def memory_efficiency(results: Results) -> list[str]:
    """Return which row of each workload makes the most of its memory."""
    texts = []
    for rows in by_workload(results.rows):
        known = [row for row in rows if is_ranked(row) and row.tokens_per_s_per_peak_gb is not None]
        if len(known) > 1:
            best = max(known, key=lambda row: row.tokens_per_s_per_peak_gb or 0.0)
            rate = rate_text(best.tokens_per_s_per_peak_gb or 0.0)
            texts.append(f"{best.name} makes the most of its memory: {rate} tokens/s per GB of its peak.")
    return texts


def ladder(results: Results) -> list[str]:
    """Return what each step from one row to the next that needs less memory buys and costs."""
    texts = []
    for rows in _ladders(results):
        for above, below in pairwise(rows):
            slower = _rate(above) / _rate(below)
            texts.append(
                f"{_who(below)} after {_who(above)} {_saving_text(below, above)}, {_cost_text(slower)}."
            )
    return texts


def next_step(results: Results) -> list[str]:
    """Return which row to take next when the fastest one runs out of memory."""
    texts = []
    for rows in by_workload(results.rows):
        known = [row for row in rows if is_ranked(row) and has_peak(row)]
        if not known:
            continue
        best = max(known, key=lambda row: (_rate(row), row.name))
        smaller = [
            row
            for row in known
            if _peak(row) <= (1 - NOTABLE_SAVING) * _peak(best) and _does_as_much(row, best)
        ]
        if smaller:
            following = max(smaller, key=lambda row: (_rate(row), row.name))
            cost = _cost_text(_rate(best) / _rate(following))
            texts.append(
                f"When memory runs out with {_who(best)}, take {_who(following)} next: it "
                f"{_saving_text(following, best)}, {cost}."
            )
    return texts


def scaling_efficiency(results: Results) -> list[str]:
    """Return the speed that a rank keeps with more ranks, weak and strong, and where that bends."""
    weak = series(results.rows, "world_size", "threads_per_rank")
    strong: list[list[Row]] = []
    for rows in series(results.rows, "world_size", "batch_size", "threads_per_rank"):
        for tokens in sorted({tokens_per_step(row) for row in rows}):
            strong.append([row for row in rows if tokens_per_step(row) == tokens])
    texts = []
    for word, groups in (("weak", weak), ("strong", strong)):
        for rows in groups:
            texts += _scaling_text(word, sorted(rows, key=lambda row: row.settings.world_size))
    return texts


def _scaling_text(word: str, rows: Sequence[Row]) -> list[str]:
    first, last = rows[0], rows[-1]
    if first.settings.world_size == last.settings.world_size:
        return []

    def kept(row: Row) -> float:
        return _rate(row) / row.settings.world_size / (_rate(first) / first.settings.world_size)

    batch = (
        f"batch {last.settings.batch_size}" if word == "weak" else f"{tokens_per_step(last):,} tokens a step"
    )
    text = (
        f"{last.strategy} keeps {100 * kept(last):.0f} % of the speed of a rank from {first.settings.world_size} to "
        f"{last.settings.world_size} ranks ({word} scaling, {batch})"
    )
    bend = next((row for row in rows if kept(row) < BENDS_BELOW), None)
    return [f"{text}; it bends at {bend.settings.world_size}." if bend is not None else f"{text}."]


CONCLUSIONS: dict[str, Callable[[Results], list[str]]] = {
    function.__name__: function
    for function in (
        accumulation_speed,
        compile_speed,
        ladder,
        largest,
        memory_efficiency,
        next_step,
        offload_cost,
        precision_speed,
        scaling_efficiency,
        stage_pays,
    )
}
"""Functions of conclusions by the name that a recipe's ``conclude`` gives."""


def _ladders(results: Results) -> list[list[Row]]:
    """Return ranked rows that do the same work, those that need most memory first; each needs notably less."""
    found = []
    for rows in by_workload(results.rows):
        known = sorted((row for row in rows if is_ranked(row) and has_peak(row)), key=_peak, reverse=True)
        steps: list[Row] = []
        for row in known:
            if not steps or (
                _peak(row) <= (1 - NOTABLE_SAVING) * _peak(steps[-1]) and _does_as_much(row, steps[-1])
            ):
                steps.append(row)
        found.append(steps)
    return found


def _rate(row: Row) -> float:
    rate = step_rate(row)
    assert rate is not None
    return rate


def _peak(row: Row) -> int:
    assert row.peak_device_bytes
    return row.peak_device_bytes


def _does_as_much(row: Row, other: Row) -> bool:
    keys = ("world_size", "batch_size", "grad_accum", *BASELINE_POINT)
    return all(getattr(row.settings, key) == getattr(other.settings, key) for key in keys)


def _who(row: Row) -> str:
    return row.strategy if row.settings.offload == "none" else f"{row.strategy} with {row.settings.offload}"


def _times(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def _saving_text(row: Row, other: Row) -> str:
    saved = _peak(other) - _peak(row)
    if saved <= 0:
        return "saves no device memory"
    return f"saves {bytes_text(saved)} ({100 * saved / _peak(other):.0f} %) of the device's peak"


def _cost_text(slower: float) -> str:
    percent = 100 * (slower - 1)
    return f"for {percent:.0f} % more time" if percent >= 1 else "for no more time"


def _tiers_text(row: Row) -> str:
    held = [
        f"{bytes_text(sum(categories.values()))} on {'NVMe' if tier == 'nvme' else 'the host'}"
        for tier, categories in (row.memory_bytes or {}).items()
        if tier != "device" and any(categories.values())
    ]
    return f"; a rank holds {join_words(held)}" if held else ""
