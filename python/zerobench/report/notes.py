"""The sentences after the table: what went wrong first, then how to read the rest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from zerobench.report.words import DTYPE_ROLES
from zerobench.results.comparing import floor_of
from zerobench.results.rows import (
    by_workload,
    checksum_marks,
    dtype_text,
    exceeds_noise,
    is_ranked,
    may_be_ranked,
    row_labels,
    saw_all_state,
    workload,
    workload_heads,
)
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import join_words, ms_text
from zerobench.results.stats import drift, ends
from zerobench.strategies.catalogue import DEFAULT_BASELINES, FLOOR

NOTABLE_LIMIT_PCT = 5.0  # of the samples in which something other than work and power cap set the clocks
BELOW_FLOOR = (
    1.02  # of_compute_only from which a row is said to take less time than its floor, where noise allows
)
FAR_LOSS = 0.1  # of the others' held-out loss; rows that train the same end within 0.02 of each other


def note_lines(results: Results, left_out: Sequence[str]) -> list[tuple[str, str]]:
    """Lines below the table, each with its style: what went wrong first, then how to read the rest."""
    rows, labels = results.rows, row_labels(results.rows)
    notes: list[tuple[str, str]] = []
    for row, label in zip(rows, labels, strict=True):
        if row.status != "ok":
            reason = (
                row.error or (row.deviation.verdict if row.deviation else None) or "no reason was recorded"
            )
            style = "bold red" if row.status == "wrong" else "yellow"
            status = f"{row.status} ({row.oom_tier} memory)" if row.oom_tier else row.status
            notes.append((f"{label}: {status}: {' '.join(reason.split())}", style))
    notes += [(warning, "yellow") for warning in results.warnings]
    read_first = (
        *_busy_notes(rows, labels),
        *_clock_notes(rows, labels),
        *_idle_disk_notes(rows, labels),
        *_skipped_notes(rows, labels),
        *_first_step_notes(rows, labels),
        *_far_loss_notes(rows, labels),
    )
    notes += [(text, "yellow") for text in read_first]
    notes += [(text, "") for text in _reading_notes(rows, labels, left_out)]
    if left_out:  # titles and units of columns
        notes.append(
            (f"Omitted to fit the width: {', '.join(left_out)}; results.csv holds every column.", "dim")
        )
    if not results.complete:
        notes.append(("Incomplete: the comparison is still running or was interrupted.", "yellow"))
    return notes


def _busy_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    notes = []
    for is_ranked_so, what in (
        (False, "so shown but not ranked"),
        (True, "and ranked all the same, since rows took turns"),
    ):
        names = [
            f"{label} ({row.busy})"
            for row, label in zip(rows, labels, strict=True)
            if row.status == "ok" and row.busy is not None and may_be_ranked(row) == is_ranked_so
        ]
        if names:
            notes.append(f"‡ measured on a busy machine, {what}: {'; '.join(names)}.")
    return notes


def _clock_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    """Rows whose times depend on how warm the GPUs were or on how somebody set them."""
    notes = []
    for field, what in (
        ("thermal_limit_pct", "A thermal limit"),
        ("other_limit_pct", "Something other than power and heat (clocks set by hand, the power supply)"),
    ):
        shares = [getattr(row.sampled, field) if row.sampled else None for row in rows]
        names = [
            f"{label} ({share:.0f} % of the samples)"
            for label, share in zip(labels, shares, strict=True)
            if share is not None and share >= NOTABLE_LIMIT_PCT
        ]
        if names:
            notes.append(f"{what} held GPU clocks down during {join_words(names)}.")
    return notes


def _fewer_layers_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    by_layers: dict[str, list[str]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row.deviation is not None and row.deviation.verified_layers is not None:
            of = row.settings.model_config_resolved.get("num_layers", "more")
            by_layers.setdefault(f"{row.deviation.verified_layers} of {of}", []).append(label)
    verified_num = sum(row.deviation is not None for row in rows)
    return [
        f"Verified with {layers} layers: {_names_text(names, verified_num)}."
        for layers, names in by_layers.items()
    ]


def _all_experts_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.deviation is not None and row.deviation.verified_experts_per_token is not None
    ]
    return [f"Verified with all experts for every token: {join_words(names)}."] if names else []


def _idle_disk_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok"
        and row.transfers is not None
        and row.transfers.nvme_read_bytes == row.transfers.nvme_written_bytes == 0
    ]
    if not names:
        return []
    return [
        f"{join_words(names)} read and wrote nothing on NVMe in measured steps, since all their state fits into "
        "host memory: their times do not measure the disk."
    ]


def _skipped_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        f"{label} ({row.skipped_steps})"
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and row.skipped_steps
    ]
    if not names:
        return []
    return [
        f"fp16 overflow skipped updates of {join_words(names)}, in measured steps or the last warm-up step; measured "
        "steps without an update are too short: give more --warmup-steps."
    ]


def _first_step_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and row.strategy != FLOOR and not saw_all_state(row)
    ]
    if not names:
        return []
    return [
        f"Peaks of {join_words(names)} are of the first step alone, and some strategies allocate their optimizer "
        "state only at its end. Memory is therefore not compared: give --warmup-steps or more --num-steps."
    ]


def _far_loss_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    """Verification sees four steps; what a row does in all of its others shows in its held-out loss alone."""
    groups: dict[tuple[Any, ...], list[tuple[float, str]]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row.status == "ok" and row.strategy != FLOOR and row.validation_loss is not None:
            groups.setdefault(trained(row), []).append((row.validation_loss, label))
    notes = []
    for found in groups.values():
        middle = median(loss for loss, _ in found)
        far = [
            f"{label} ({loss:.3g})" for loss, label in found if abs(loss - middle) > FAR_LOSS * abs(middle)
        ]
        if len(found) > 2 and far:
            notes.append(
                "Held-out loss after the measured steps is far from that of the rows with the same training "
                f"({middle:.3g} in the middle): {join_words(far)}. Unless training diverges (try a lower --lr), "
                "something is wrong."
            )
    return notes


def trained(row: Row) -> tuple[Any, ...]:
    """Return what is equal in rows that have seen the same tokens with the same hyperparameters."""
    settings = row.settings
    return (
        *workload(row),
        settings.batch_size,
        settings.world_size * settings.grad_accum,
        settings.warmup_steps + settings.num_steps,
        settings.seed,
        settings.clip,
        tuple(sorted((key, repr(value)) for key, value in settings.optimizer.items())),
    )


def _checksum_notes(rows: Sequence[Row], *, is_marked: bool) -> list[str]:
    marks = checksum_marks(rows)
    notes = []
    if is_marked and "=" in marks:
        notes.append("= parameters equal bit for bit among the rows marked so.")
    elif "=" in marks and "≠" not in marks:
        notes.append("ZeRO stages with the same settings ended with parameters equal bit for bit.")
    if is_marked and "≠" in marks:  # else wrong rows say it
        notes.append("≠ parameters differ among the rows marked so, which should be equal bit for bit.")
    return notes


def _turns_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    """How rows were measured together, a line a way."""
    notes = []
    for how, words in (("in turn", "in turn"), ("passes", "in passes, fresh runs of one window each")):
        found = [
            (row.turns, label)
            for row, label in zip(rows, labels, strict=True)
            if row.status == "ok" and row.turns is not None and row.turns.how == how
        ]
        if not found:
            continue
        names = _names_text([label for _, label in found], len(rows))
        runs = _range([len(turns.windows_ms) for turns, _ in found], "run")
        steps = _range([turns.steps_per_window for turns, _ in found], "step")
        rounds = _range([len(turns.windows_ms[0]) for turns, _ in found], "round")
        counted = f"{rounds} x {steps}, {runs}" if how == "in turn" else f"{runs} x {steps}"
        notes.append(f"Measured {words}: {names}; {counted}.")
    return notes


def _alone_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    """Return which rows did not take turns, if there are several."""
    names = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and row.turns is None and row.step_time_ms is not None
    ]
    if len(names) < 2:
        return []
    return [
        f"Measured one after the other: {_names_text(names, len(rows))}. Intervals leave out how the machine changed "
        "in between; with --rounds, rows take turns."
    ]


def _names_text(names: Sequence[str], row_num: int) -> str:
    """Return "all rows" if there are several of ``row_num`` rows and all are named, else their names."""
    return "all rows" if len(names) == row_num > 1 else join_words(names)


def _range(values: Sequence[int], word: str) -> str:
    """Such as "10 to 47 steps"."""
    low, high = min(values), max(values)
    return f"{low if low == high else f'{low} to {high}'} {word}{'s' if high != 1 else ''}"


def _reading_notes(rows: Sequence[Row], labels: Sequence[str], left_out: Sequence[str]) -> list[str]:
    notes = _turns_notes(rows, labels) + _alone_notes(rows, labels)
    notes += _checksum_notes(rows, is_marked="update deviation" not in left_out)
    notes += _fewer_layers_notes(rows, labels)
    notes += _all_experts_notes(rows, labels)
    apart = [
        f"{label} ({dtype_text(row) or 'unknown'})"
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and not row.comparable
    ]
    if apart:
        notes.append(f"† other dtypes, so shown but not ranked: {'; '.join(apart)}, as {DTYPE_ROLES}.")
    floors = [row for row in rows if row.strategy == FLOOR and row.status == "ok"]
    if floors:
        together = any(row.settings.world_size > 1 for row in floors)
        where = ", by each rank for itself, as long as the slowest one took" if together else ""
        notes.append(
            f"{FLOOR}: forward and backward without communication or optimizer{where}: the floor, nothing to verify."
        )
        if text := _below_floor_text(rows, labels):
            notes.append(text)
    peaks = {
        f"{row.mfu.peak_tflops:g} TFLOP/s a GPU ({row.mfu.peak_of})"
        for row in rows
        if row.status == "ok" and row.mfu is not None
    }
    if peaks and "MFU %" not in left_out:
        notes.append(f"MFU is relative to a peak of {join_words(sorted(peaks))}.")
    ranked = [row for row in rows if is_ranked(row)]
    if len(by_workload(ranked)) > 1:
        alike = ["model", "sequence length", "precision", "data"]
        alike += ["network"] if len({row.settings.network for row in ranked}) > 1 else []
        notes.append(f"Relative is within rows of one {join_words(alike)}.")
    if not {"speedup vs baseline", "memory vs baseline"} <= {*left_out} and (text := _baselines_text(rows)):
        notes.append(text)
    if text := _outlier_text(rows, labels):
        notes.append(text)
    if text := _drift_text(rows, labels):
        notes.append(text)
    if ranked and not any(row.baseline for row in rows):
        default = " or ".join(DEFAULT_BASELINES)
        notes.append(
            f"No baseline row is {_usable_text(rows)} (by default {default}): no speedup and no memory change."
        )
    return notes


def _usable_text(rows: Sequence[Row]) -> str:
    """Return what a baseline row has to be."""
    return "ok and comparable" if all(map(may_be_ranked, rows)) else "ok, comparable and free of ‡"


def _baselines_text(rows: Sequence[Row]) -> str:
    """Return the baselines of all workloads, if they are not the same strategy, so that the heads of columns cannot
    name them."""
    strategies = {row.name: row.strategy for row in rows}
    workloads = by_workload(rows)
    found = [{strategies[row.baseline] for row in group if row.baseline in strategies} for group in workloads]
    if len(set().union(*found)) < 2:
        return ""
    heads = workload_heads([group[0] for group in workloads])
    texts = [
        f"{' and '.join(sorted(names))} ({head})" for names, head in zip(found, heads, strict=True) if names
    ]
    return f"Baselines: {join_words(texts)}."


def _below_floor_text(rows: Sequence[Row], labels: Sequence[str]) -> str:
    """Return the note on rows that are faster than the floor. If hosts are the limit, the floor is not a bound: it
    includes what plain PyTorch does there, and not every row does that."""
    faster = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and _is_below_floor(row, rows)
    ]
    if not faster:
        return ""
    busy = [
        row.device_busy_pct
        for row in rows
        if row.strategy == FLOOR and row.status == "ok" and row.device_busy_pct is not None
    ]
    when = f" (its GPU was busy {min(busy):.0f} % of the time)" if busy else ""
    return (
        f"{join_words(faster)} took less time than {FLOOR}{when}: where the host is the limit, it is not a lower "
        "bound, since it includes the host time of plain PyTorch's forward and backward."
    )


def _is_below_floor(row: Row, rows: Sequence[Row]) -> bool:
    share = row.of_compute_only
    if share is None or share < BELOW_FLOOR:
        return False
    floor = floor_of(row, [other for other in rows if workload(other) == workload(row)])
    return floor is not None and exceeds_noise(share, floor, row)


def _outlier_text(rows: Sequence[Row], labels: Sequence[str]) -> str:
    flagged = [
        (f"{label}: {outlier_num} of {len(row.step_time_ms.samples)}", outlier_num)
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and row.step_time_ms is not None
        if (outlier_num := len(row.step_time_ms.outliers))
    ]
    if not flagged:
        return ""
    what = "windows" if any(row.turns is not None for row in rows) else "steps"
    return (
        f"Outlying {what} (kept): {_by_row(flagged)}. Something else may have run: repeat on a quiet machine."
    )


def _drift_text(rows: Sequence[Row], labels: Sequence[str]) -> str:
    drifts = [
        (f"{label}, {_end_text(windows)}", abs(share))
        for row, label in zip(rows, labels, strict=True)
        if (windows := _windows(row)) and (share := drift(windows))
    ]
    if not drifts:
        return ""
    return (
        f"Step times that still changed while they were measured: {_by_row(drifts)}. The step time of a long "
        "training is therefore not known: give more --warmup-steps and --num-steps."
    )


def _end_text(windows: Sequence[Sequence[float]]) -> str:
    first, last = ends(windows)
    return f"{ms_text(first)} in the first quarter of its steps and {ms_text(last)} in the last"


def _windows(row: Row) -> list[list[float]]:
    """Step times by repeat; none of a row that took turns, whose windows see the machine drift over minutes."""
    if row.status != "ok" or row.step_time_ms is None or row.turns is not None:
        return []
    samples, step_num = row.step_time_ms.samples, row.settings.num_steps
    return [samples[begin : begin + step_num] for begin in range(0, len(samples), step_num)]


def _by_row(found: Sequence[tuple[str, float]]) -> str:
    """Return the text of each row, or, if there are many rows, of the one with the most."""
    if len(found) <= 4:
        return "; ".join(text for text, _ in found)
    return f"in {len(found)} rows, most in {max(found, key=lambda entry: entry[1])[0]}"
