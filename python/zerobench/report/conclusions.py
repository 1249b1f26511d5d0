"""Sentences that recipes conclude with. Each function says what the rows support, and nothing where they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from zerobench.report.paces import Pace, doubt_text, pace, rate, times_text
from zerobench.report.phases import phases_pct
from zerobench.report.speed_conclusions import (
    accumulation_speed,
    compile_payback,
    compile_speed,
    precision_speed,
    run_spread,
    scaling_efficiency,
)
from zerobench.results.comparing import BASELINE_POINT, plain_twin
from zerobench.results.rows import by_workload, fastest, has_peak, is_ranked, row_labels, workload_heads
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import bytes_text, join_words, rate_text
from zerobench.results.verdicts import WORKS_WITHIN
from zerobench.strategies.catalogue import FLOOR, OURS

NOTABLE_SAVING = 0.05  # of the peak, from which a row is said to need less


def offload_cost(results: Results) -> list[str]:
    """Return what each offload costs in time and saves on the device, against the same row without."""
    texts = []
    for row in results.rows:
        plain = (
            plain_twin(row, results.rows) if row.status == "ok" and row.settings.offload != "none" else None
        )
        if plain is None or not has_peak(row) or not has_peak(plain):
            continue
        paces = [pace(plain, row)]
        text = f"{row.strategy} with {row.settings.offload} takes {times_text(paces)} the step time without offload"
        text += f"{doubt_text(paces)} and {_saving_text(row, plain)}"
        texts.append(f"{text}{_waits_text(row)}{_tiers_text(row)}.")
    return texts


def largest(results: Results) -> list[str]:
    """Return the largest value that --find found for each row."""
    found = [(row, row.search) for row in results.rows if row.status == "ok" and row.search is not None]
    return [
        f"{_who(row)} fits {search.setting} {search.largest} at most, at {rate_text(rate(row))} tokens/s."
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
    slower = max((pace(other, row) for other in rivals), key=lambda found: found.value)
    if slower.value > WORKS_WITHIN or _peak(row) > (1 - NOTABLE_SAVING) * _peak(least):
        return None
    return f"it {_saving_text(row, least)} compared with stage {least.stage}, {_cost_text(slower)}"


def memory_efficiency(results: Results) -> list[str]:
    """Return which row of each workload makes the most of its memory."""
    texts = []
    for head, rows in _workloads(results):
        known = [row for row in rows if is_ranked(row) and row.tokens_per_s_per_peak_gb is not None]
        if len(known) > 1:
            label, best = max(
                zip(row_labels(known), known, strict=True),
                key=lambda labelled: labelled[1].tokens_per_s_per_peak_gb or 0.0,
            )
            rate = rate_text(best.tokens_per_s_per_peak_gb or 0.0)
            texts.append(f"{head}{label} makes the most of its memory: {rate} tokens/s per GB of its peak.")
    return texts


def ladder(results: Results) -> list[str]:
    """Return what each step from one row to the next that needs less memory buys and costs."""
    texts = []
    for head, rows in _ladders(results):
        for above, below in pairwise(rows):
            slower = pace(above, below)
            texts.append(
                f"{head}{_who(below)} after {_who(above)} {_saving_text(below, above)}, {_cost_text(slower)}."
            )
    return texts


def next_step(results: Results) -> list[str]:
    """Return which row to take next when the fastest one runs out of memory."""
    texts = []
    for head, rows in _workloads(results):
        known = [row for row in rows if is_ranked(row) and has_peak(row)]
        if not known:
            continue
        best = fastest(known)
        assert best is not None
        smaller = [
            row
            for row in known
            if _peak(row) <= (1 - NOTABLE_SAVING) * _peak(best) and _does_as_much(row, best)
        ]
        following = fastest(smaller)
        if following is not None:
            cost = _cost_text(pace(best, following))
            when = f"{head}when" if head else "When"
            texts.append(
                f"{when} memory runs out with {_who(best)}, take {_who(following)} next: it "
                f"{_saving_text(following, best)}, {cost}."
            )
    return texts


CONCLUSIONS: dict[str, Callable[[Results], list[str]]] = {
    function.__name__: function
    for function in (
        accumulation_speed,
        compile_payback,
        compile_speed,
        ladder,
        largest,
        memory_efficiency,
        next_step,
        offload_cost,
        precision_speed,
        run_spread,
        scaling_efficiency,
        stage_pays,
    )
}
"""Functions of conclusions by the name that a recipe's ``conclude`` gives."""


def _workloads(results: Results) -> list[tuple[str, list[Row]]]:
    """Return the rows of each workload, and what its sentences begin with: nothing where there is one workload."""
    groups = by_workload(results.rows)
    if len(groups) < 2:
        return [("", rows) for rows in groups]
    heads = workload_heads([rows[0] for rows in groups])
    return [(f"{head}: ", rows) for head, rows in zip(heads, groups, strict=True)]


def _ladders(results: Results) -> list[tuple[str, list[Row]]]:
    """Return ranked rows that do the same work, those that need most memory first; each needs notably less. Also how
    the sentences on them begin."""
    found = []
    for head, rows in _workloads(results):
        known = sorted((row for row in rows if is_ranked(row) and has_peak(row)), key=_peak, reverse=True)
        steps: list[Row] = []
        for row in known:
            if not steps or (
                _peak(row) <= (1 - NOTABLE_SAVING) * _peak(steps[-1]) and _does_as_much(row, steps[-1])
            ):
                steps.append(row)
        found.append((head, steps))
    return found


def _peak(row: Row) -> int:
    assert row.peak_device_bytes
    return row.peak_device_bytes


def _does_as_much(row: Row, other: Row) -> bool:
    keys = ("world_size", "batch_size", "grad_accum", *BASELINE_POINT)
    return all(getattr(row.settings, key) == getattr(other.settings, key) for key in keys)


def _who(row: Row) -> str:
    return row.strategy if row.settings.offload == "none" else f"{row.strategy} with {row.settings.offload}"


def _saving_text(row: Row, other: Row) -> str:
    saved = _peak(other) - _peak(row)
    if saved <= 0:
        return "saves no device memory"
    return f"saves {bytes_text(saved)} ({100 * saved / _peak(other):.0f} %) of the device's peak"


def _cost_text(slower: Pace) -> str:
    percent = 100 * (slower.value - 1)
    if percent < 1:
        return "without taking more time"
    doubt = "within noise" if slower.is_noise else slower.caveat
    return f"for {percent:.0f} % more time{f' ({doubt})' if doubt else ''}"


def _waits_text(row: Row) -> str:
    """Return how much of an offloaded step only waits for what moves."""
    shares = phases_pct(row)
    waits = [
        f"{shares[phase]:.0f} % for {word}"
        for phase, word in (("exposed_offload", "transfers"), ("exposed_io", "files"))
        if phase in shares
    ]
    return f"; of a step it waits {join_words(waits)}" if waits else ""


def _tiers_text(row: Row) -> str:
    held = [
        f"{bytes_text(sum(categories.values()))} on {'NVMe' if tier == 'nvme' else 'the host'}"
        for tier, categories in (row.memory_bytes or {}).items()
        if tier != "device" and any(categories.values())
    ]
    return f"; a rank holds {join_words(held)}" if held else ""
