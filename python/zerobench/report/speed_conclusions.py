"""Sentences on speed: precision, compilation, accumulation and scaling. Each says what the rows support, or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from zerobench.report.paces import Pace, doubt_text, pace, times_text
from zerobench.report.phases import phases_pct
from zerobench.results.rows import run_num, step_rate, tokens_per_step
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import range_text
from zerobench.strategies.catalogue import FLOOR, eager_form

SCALES_FROM = 0.80  # of the speed of a rank alone; with less a strategy no longer scales
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
    found: dict[tuple[Any, ...], list[Pace]] = {}
    for rows in series(results.rows, "precision", "tf32"):
        base = next((row for row in rows if row.settings.precision == "fp32"), None)
        for row in rows:
            if base is not None and row is not base:
                key = (row.settings.precision, row.settings.batch_size, row.settings.seq_length)
                found.setdefault(key, []).append(pace(row, base))
    return [
        f"{precision} is {times_text(paces)} fp32 at batch {batch}, sequence {seq}{doubt_text(paces)}."
        for (precision, batch, seq), paces in found.items()
    ]


def run_spread(results: Results) -> list[str]:
    """Return how far runs in fresh processes differ, over all rows that have several."""
    rows = [row for rows in series(results.rows) for row in rows if row.over_runs]
    shares = [
        100 * spread.std / spread.median
        for row in rows
        if (spread := (row.over_runs or {}).get("tokens_per_s")) is not None and spread.median
    ]
    if not shares:
        return []
    runs = {run_num(row) for row in rows}
    word = f"{min(runs)} to {max(runs)}" if len(runs) > 1 else f"{runs.pop()}"
    return [
        f"Over {word} runs the standard deviation of tokens/s is {min(shares):.1f} to {max(shares):.1f} % of the "
        "median; results.csv has it for each row."
    ]


def compile_speed(results: Results) -> list[str]:
    """Return such as "zero3 with --compile block is 1.2 to 1.4 times eager"."""
    return [
        f"{strategy} with --compile {mode} is {times_text(paces)} eager{doubt_text(paces)}."
        for (strategy, mode), pairs in _compiled(results).items()
        for paces in [[pace(row, base) for row, base in pairs]]
    ]


def compile_payback(results: Results) -> list[str]:
    """Return what compiling takes, and after how many steps it has paid."""
    texts = []
    for (strategy, mode), pairs in _compiled(results).items():
        known = [(row, base) for row, base in pairs if row.compile_s is not None]
        if not known:
            continue
        taken = [row.compile_s or 0.0 for row, _ in known]
        steps = [paid for row, base in known if (paid := _steps_until_paid(row, base)) is not None]
        text = f"{strategy} with --compile {mode} takes {range_text(taken, '.1f')} s to compile"
        if not steps:
            text += ", which never pays off: nothing is faster than eager beyond noise"
        else:
            text += f", which pays off after {range_text(steps, ',.0f')} steps"
            text += f" (in {len(steps)} of {len(known)} pairs)" if len(steps) < len(known) else ""
        texts.append(f"{text}.")
    return texts


def _compiled(results: Results) -> dict[tuple[str, str], list[tuple[Row, Row]]]:
    """Return compiled rows with their eager ones, by strategy and mode."""
    found: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    alike = [
        row.model_copy(update={"strategy": eager_form(row.strategy)})
        for rows in series(results.rows)
        for row in rows
    ]
    by_name = {row.name: row for row in results.rows}
    for rows in series(alike, "compile"):
        base = next((row for row in rows if row.settings.compile == "none"), None)
        for row in rows:
            if base is not None and row.settings.compile != "none":
                own = by_name[row.name]
                found.setdefault((own.strategy, own.settings.compile), []).append((own, by_name[base.name]))
    return found


def _steps_until_paid(row: Row, base: Row) -> int | None:
    """Return after how many steps the time saved exceeds that of compiling; None where nothing surely is saved."""
    found = pace(row, base)
    if found.value <= 1 or found.is_noise:
        return None
    assert row.step_time_ms is not None and row.compile_s is not None
    saved_s = row.step_time_ms.median / 1e3 * (found.value - 1)
    return math.ceil(row.compile_s / saved_s)


def accumulation_speed(results: Results) -> list[str]:
    """Return what accumulation gains in tokens a second, and what it saves on the wire."""
    texts = []
    for rows in series(results.rows, "grad_accum", "batch_size"):
        rows = sorted(rows, key=lambda row: (row.settings.grad_accum, -row.settings.batch_size))
        first, last = rows[0], rows[-1]
        if first.settings.grad_accum == last.settings.grad_accum:
            continue
        paces = [pace(last, first)]
        text = (
            f"{last.strategy} with accumulation {last.settings.grad_accum} has {times_text(paces)} the speed of "
            f"accumulation {first.settings.grad_accum}{doubt_text(paces)}"
        )
        if first.communication_bytes and last.communication_bytes:
            wires = [row.communication_bytes / tokens_per_step(row) for row in (first, last)]  # type: ignore[operator]
            text += f", with {wires[1]:,.0f} bytes on the wire a token instead of {wires[0]:,.0f}"
        texts.append(f"{text}.")
    return texts


def scaling_efficiency(results: Results) -> list[str]:
    """Return the speed that a rank keeps with more ranks, weak and strong, what communication that nothing hides takes,
    and from how many ranks on a rank keeps less than ``SCALES_FROM``."""
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
    kept = _kept(last, first)
    batch = (
        f"batch {last.settings.batch_size}" if word == "weak" else f"{tokens_per_step(last):,} tokens a step"
    )
    text = (
        f"{last.strategy} keeps {100 * kept.value:.0f} % of the speed per rank from {first.settings.world_size} "
        f"to {last.settings.world_size} ranks ({word} scaling, {batch}{_kept_doubt_text(kept)})"
    )
    exposed = phases_pct(last).get("exposed_communication")
    if exposed is not None:
        text += f"; there exposed communication is {exposed:.0f} % of a step"
    ended = next((row for row in rows if _kept(row, first).value < SCALES_FROM), None)
    if ended is not None:
        text += f"; from {ended.settings.world_size} ranks on it keeps less than {100 * SCALES_FROM:.0f} %"
    return [f"{text}."]


def _kept(row: Row, first: Row) -> Pace:
    """Return the speed of a rank over that of a rank of the first row."""
    if row is first:
        return Pace(1.0)
    share = first.settings.world_size / row.settings.world_size
    value, low, high, caveat = pace(row, first)
    return Pace(share * value, low and share * low, high and share * high, caveat)


def _kept_doubt_text(kept: Pace) -> str:
    texts = []
    if kept.low is not None and kept.high is not None and f"{kept.low:.2f}" != f"{kept.high:.2f}":
        texts.append(f", 95 % interval {100 * kept.low:.0f} to {100 * kept.high:.0f} %")
    if kept.caveat:
        texts.append(f", {kept.caveat}")
    return "".join(texts)
