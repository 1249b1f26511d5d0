"""Several result files as one: runs with the same settings on the same machine become repeats of one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zerobench.errors import DataError
from zerobench.results.comparing import finish_rows
from zerobench.results.files import AnyPath, read_results
from zerobench.results.rows import run_num, tokens_per_step
from zerobench.results.runs import set_runs
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import join_words
from zerobench.results.stats import summarise

# Facts under machine.details that differ from run to run on one machine.
_PASSING_DETAILS = ("load_average", "memory_available_bytes")
# A row of several runs has the first of these statuses that any run has: right before fast, as with --repeats.
_WORST_FIRST = ("wrong", "failed", "oom", "ok", "skipped")
_LARGEST = (
    "peak_device_bytes",
    "torch_allocated_peak_bytes",
    "torch_reserved_peak_bytes",
    "outside_torch_bytes",
    "device_used_peak_bytes",
    "peak_host_bytes",
)
_SHOWN_DIFFERENCES = 4
_TOLD_BY_RUN = tuple(key for key, setting in SETTINGS.items() if setting.known_after_run)


class Merged(NamedTuple):
    """Results of one machine and one set of versions."""

    results: Results
    sources: list[str]
    """The paths as they were given."""
    difference: str = ""
    """Why it was not merged with the first, as its warnings say; empty for the first."""


def read_merged(paths: Sequence[AnyPath]) -> list[Merged]:
    """Return the results at ``paths`` merged, those of each machine and set of versions on their own.

    Rows with equal settings become one row, whose samples are those of all runs in the order of the paths. Results
    that were kept apart say in their warnings what they differ in. A single path gives its results as they are.
    Raises DataError for a path that holds no results, or the same ones as another."""
    found = [(str(path), read_results(path)) for path in paths]
    if len(found) == 1:
        return [Merged(found[0][1], [found[0][0]])]
    _expect_different(found)
    groups: dict[str, list[tuple[str, Results]]] = {}
    for source, results in found:
        groups.setdefault(repr(sorted(surroundings(results).items())), []).append((source, results))
    merged = [
        Merged(_merge_alike([results for _, results in group]), [source for source, _ in group])
        for group in groups.values()
    ]
    apart = [other._replace(difference=_difference_text(merged[0], other)) for other in merged[1:]]
    for other in apart:
        other.results.warnings.append(other.difference)
    return [merged[0], *apart]


def _expect_different(found: Sequence[tuple[str, Results]]) -> None:
    """Raise DataError where two paths hold the same comparison, which would count twice."""
    seen: dict[str, str] = {}
    for source, results in found:
        key = repr((results.created, results.command, [(row.name, row.started) for row in results.rows]))
        if key in seen:
            raise DataError(f"{seen[key]} and {source} hold the same comparison: give one of them")
        seen[key] = source


def surroundings(results: Results) -> dict[str, Any]:
    """Return what must be equal for runs to be repeats: facts of the machine and versions, by dotted key."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if prefix != "machine.details" or key not in _PASSING_DETAILS:
                    walk(f"{prefix}.{key}", item)
        else:
            flat[prefix] = value

    walk("machine", results.machine)
    walk("versions", results.versions)
    return flat


def _difference_text(first: Merged, other: Merged) -> str:
    """Return the sentence on why two results were not merged."""
    ours, theirs = surroundings(other.results), surroundings(first.results)
    keys = [key for key in dict.fromkeys([*theirs, *ours]) if ours.get(key) != theirs.get(key)]
    texts = [
        f"{key.removeprefix('machine.')} is {_short(ours.get(key))} instead of {_short(theirs.get(key))}"
        for key in keys[:_SHOWN_DIFFERENCES]
    ]
    if len(keys) > len(texts):
        texts.append(f"{len(keys) - len(texts)} more facts differ")
    return (
        f"{join_words(other.sources)} cannot be merged with {join_words(first.sources)}, since the machine or versions "
        f"differ: {join_words(texts)}."
    )


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _merge_alike(found: Sequence[Results]) -> Results:
    """Return the results of runs on one machine, with its versions, as one."""
    rows = [row for results in found for row in results.rows]
    merged = found[0].model_copy(deep=True)
    merged.rows = _with_own_names([_pool(runs) for runs in _runs_by_row(rows)])
    merged.created = min(results.created for results in found)
    merged.command = "; ".join(dict.fromkeys(results.command for results in found))
    merged.closing = []
    merged.complete = all(results.complete for results in found)
    merged.warnings = list(dict.fromkeys(text for results in found for text in results.warnings))
    finish_rows(merged, _baseline_strategy(found))
    return merged


def _runs_by_row(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows in groups that are runs of one row. A run that measured nothing joins the first that fits."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        asked, told_by_run = asked_and_told(row)
        alike = groups.setdefault(repr((row.strategy, sorted(asked.items()))), {})
        if row.step_time_ms is None:
            alike.setdefault(next(iter(alike), ""), []).append(row)
        elif "" in alike:  # so far only runs that measured nothing
            alike[repr(told_by_run)] = [*alike.pop(""), row]
        else:
            alike.setdefault(repr(told_by_run), []).append(row)
    return [runs for alike in groups.values() for runs in alike.values()]


def asked_and_told(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that make two runs one row: those that were asked for, and those that a run tells."""
    asked = {key: value for key, value in row.settings.model_dump().items() if key != "repeats"}
    return asked, {key: asked.pop(key) for key in _TOLD_BY_RUN}


def _with_own_names(rows: list[Row]) -> list[Row]:
    """Return the rows with a number after the names that several have: settings that names leave out differ."""
    seen: dict[str, int] = {}
    for row in rows:
        seen[row.name] = number = seen.get(row.name, 0) + 1
        if number > 1:
            row.name = f"{row.name} ({number})"
    return rows


def _baseline_strategy(found: Iterable[Results]) -> str | None:
    """Return the strategy that all results compare with, or None where that is not one."""
    strategies = {
        other.strategy
        for results in found
        for row in results.rows
        for other in results.rows
        if row.baseline == other.name
    }
    return strategies.pop() if len(strategies) == 1 else None


def _pool(runs: Sequence[Row]) -> Row:
    """Return the row that several runs make: the samples of all, the largest peaks, all else from the first."""
    status = next(status for status in _WORST_FIRST if any(row.status == status for row in runs))
    number, first = next((index, row) for index, row in enumerate(runs, 1) if row.status == status)
    pooled = first.model_copy(deep=True)
    measured = [row for row in runs if row.status == "ok"]
    if status != "ok":
        if len(runs) > 1 and pooled.error:
            pooled.error = f"run {number} of {len(runs)}: {pooled.error}"
        return pooled
    pooled.settings.repeats = sum(run_num(row) for row in measured if row.step_time_ms is not None) or 1
    for name in _LARGEST:
        known = [value for row in measured if (value := getattr(row, name)) is not None]
        setattr(pooled, name, max(known, default=None))
    if pooled.skipped_steps is not None:
        pooled.skipped_steps = sum(row.skipped_steps or 0 for row in measured)
    if pooled.sampled is not None:
        pooled.sampled.shared_gpus = _shared_gpus(measured)
    pooled.comparable = all(row.comparable for row in measured)
    pooled.busy = next((row.busy for row in measured if row.busy), None)
    if len(measured) > 1:
        _pool_times(pooled, measured)
    return pooled


def _pool_times(pooled: Row, measured: Sequence[Row]) -> None:
    """Fill the step times of all runs, and the rates that follow from their median."""
    samples = [time for row in measured if row.step_time_ms for time in row.step_time_ms.samples]
    if pooled.step_time_ms is None or not samples:
        return
    before = pooled.step_time_ms.median
    pooled.step_time_ms = summarise(samples)
    pooled.turns = None  # rounds of one folder are not those of another
    set_runs(pooled, [run for row in measured for run in row.runs or ()])
    step_s = pooled.step_time_ms.median / 1e3
    faster = before / pooled.step_time_ms.median
    pooled.tokens_per_s = tokens_per_step(pooled) / step_s
    pooled.samples_per_s = pooled.tokens_per_s / pooled.settings.seq_length
    if pooled.mfu is not None:
        pooled.mfu.pct *= faster
        pooled.mfu.tflops_per_gpu *= faster
    if pooled.transfers is not None and pooled.transfers.achieved_gb_s is not None:
        achieved = pooled.transfers.achieved_gb_s
        pooled.transfers.achieved_gb_s = {way: rate * faster for way, rate in achieved.items()}


def _shared_gpus(runs: Iterable[Row]) -> list[int] | None:
    """Return the GPUs that another process used in any run, or None where no run knows."""
    known = [row.sampled.shared_gpus for row in runs if row.sampled and row.sampled.shared_gpus is not None]
    return sorted({gpu for gpus in known for gpu in gpus}) if known else None
