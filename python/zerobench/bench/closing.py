"""Sentences that end the summary: the largest setting that fits, found by ``--find`` or estimated. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zerobench.bench.execution import why_not_started
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.find import KEYS, LIMITS, at_value, bounds_of, value_in
from zerobench.bench.plan.fit import least_rank_bytes
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.surroundings import Surroundings
from zerobench.results.rows import WORKLOAD_KEYS, by_workload, row_labels, workload_heads
from zerobench.results.schema import Row
from zerobench.results.sizes import GIB
from zerobench.strategies.catalogue import FLOOR

_VERBS = {"failed": "failed", "skipped": "was skipped", "wrong": "was wrong"}


class Estimate(NamedTuple):
    """A value that the estimate leaves room for; whoever needs the least state is the best of equal ones."""

    value: int
    spare_bytes: int  # the state that a rank holds, negated
    configuration: Configuration


def closing(
    configurations: Sequence[Configuration],
    rows: Sequence[Row],
    *,
    options: CompareOptions,
    host: Surroundings,
) -> list[str]:
    """Return a sentence for each workload that was searched, or that has no row which fits."""
    if options.find is not None:
        groups = _searched_groups(rows, options.find)
        texts = [_found_text(group, options.find) for group in groups]
        return [*_other_bounds(rows, options.find), *_with_heads(texts, groups)]
    of_row = {row.name: configuration for configuration, row in zip(configurations, rows, strict=False)}
    groups = [group for group in by_workload(rows) if _is_all_oom(group)]
    texts = [
        _estimated_text([of_row[row.name] for row in group if row.status == "oom"], options, host)
        for group in groups
    ]
    return _with_heads(texts, groups)


def _with_heads(texts: Sequence[str], groups: Sequence[Sequence[Row]]) -> list[str]:
    """Return the sentences, each after what tells its group from the others where there are several."""
    if len(texts) < 2:
        return [*texts]
    heads = workload_heads([group[0] for group in groups])
    return [f"{head}: {text}" for head, text in zip(heads, texts, strict=True)]


def _other_bounds(rows: Sequence[Row], find: str) -> list[str]:
    """Return a sentence for each row that something other than memory kept from a larger value."""
    return [
        f"{label} found no larger {find}, but not because of memory: {find} {one.value} {text}."
        for row, label in zip(rows, row_labels(rows), strict=True)
        if row.search is not None and row.search.largest is not None
        for one in row.search.tries
        if one.value == row.search.too_large and one.status not in ("ok", "oom")
        if (text := f"{_VERBS[one.status]}: {' '.join((one.error or '').split())}")
    ]


def _searched_groups(rows: Sequence[Row], find: str) -> list[list[Row]]:
    """Return the searched rows in groups that differ in nothing of their workload but what was searched."""
    keys = [key for key in WORKLOAD_KEYS if key != KEYS[find]]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.search is not None and row.strategy != FLOOR:
            groups.setdefault(tuple(getattr(row.settings, key) for key in keys), []).append(row)
    return list(groups.values())


def _found_text(rows: Sequence[Row], find: str) -> str:
    fitting = [
        (row.search.largest, row.tokens_per_s or 0.0, label, row)
        for row, label in zip(rows, row_labels(rows), strict=True)
        if row.status == "ok" and row.search is not None and row.search.largest is not None
    ]
    if not fitting:
        least = min(value_in(find, row.settings) for row in rows)
        return f"No {find} was found that fits, down to {find} {least}: see the statuses of the rows."
    value, _, label, row = max(fitting, key=lambda one: one[:3])
    return f"The largest {find} that fits is {value}, with {label}. It runs by: {row.rerun}"


def _is_all_oom(rows: Sequence[Row]) -> bool:
    """Return whether all rows that could run are out of memory."""
    return {row.status for row in rows if row.status != "skipped" and row.strategy != FLOOR} == {"oom"}


def _estimated_text(
    configurations: Sequence[Configuration], options: CompareOptions, host: Surroundings
) -> str:
    """Return what the estimate leaves room for, below what ran out of memory, and the command that finds what fits."""
    for find in ("batch", "layers"):
        least = min(value_in(find, configuration.settings) for configuration in configurations)
        found = [
            Estimate(value, -least_rank_bytes(configuration).device, configuration)
            for configuration in configurations
            if value_in(find, configuration.settings) == least
            and (value := _estimated(configuration, find, options, host)) is not None
        ]
        if found:
            best = max(found, key=lambda estimate: estimate[:2])
            return (
                f"Every row is out of memory. By the estimate of state and logits, without activations, "
                f"{best.configuration.strategy} fits {find} {best.value} at most. Find the largest that fits: "
                f"{rerun_command(best.configuration, options)} --find {find}{_limit_words(options, host, best)}"
            )
    return (
        "Every row is out of memory. By the estimate of state and logits no batch and no number of layers fits: use a "
        "narrower model, more ranks or --offload."
    )


def _estimated(
    configuration: Configuration, find: str, options: CompareOptions, host: Surroundings
) -> int | None:
    """Return the largest value below the configuration's that the estimate leaves room for, or None."""
    least, top = bounds_of(configuration, find).least, value_in(find, configuration.settings)
    if find == "layers" and "place" in configuration.model:
        return None
    low, high = least - 1, top  # low: fits, high: does not
    while high - low > 1:
        middle = (low + high) // 2
        candidate = at_value(configuration, find, middle)
        if why_not_started(candidate, options=options, host=host) is None:
            low = middle
        else:
            high = middle
    return low if low >= least else None


def _limit_words(options: CompareOptions, host: Surroundings, best: Estimate) -> str:
    """Return the limit that a search on CPU ranks needs where none is given: the rank's share of free memory."""
    if options.device != "cpu" or any(getattr(options, limit) is not None for limit in LIMITS):
        return ""
    share = host.memory_available_bytes() / best.configuration.settings.world_size / GIB
    return f" --memory-limit {math.floor(100 * share) / 100:g}"
