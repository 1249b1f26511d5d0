"""From what the ranks reported to a row: verdict first, figures only for what is right. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.protocol.job import Report, Window
from zerobench.bench.protocol.tolerances import (
    VERIFY_STEPS,
    describe,
    exceeded,
    nan_last,
    rate_hint,
    tolerance_precision,
    tolerances,
)
from zerobench.results.rows import tokens_per_step
from zerobench.results.runs import add_run, set_runs
from zerobench.results.schema import Collective, Deviation, Results, Row, Run, Transfers, Turns
from zerobench.results.stats import summarise
from zerobench.strategies.catalogue import FLOOR, OURS, REFERENCE
from zerobench.strategies.pipelining import bubble_share


@dataclass(frozen=True, kw_only=True)
class ReferenceRun:
    """The reference of a group of rows: its file and figures, or why there is none."""

    name: str = REFERENCE
    model: dict[str, Any]  # what was verified, perhaps with fewer layers than what is measured
    file: str | None = None
    loss: float = math.nan
    norm: float | None = None
    loss_dtype: str | None = None
    error: str | None = None
    why_fewer_layers: str = "since the reference of all would not fit"


_MOVED = {
    "to_host": "to_host_bytes",
    "to_device": "to_device_bytes",
    "nvme_read": "nvme_read_bytes",
    "nvme_write": "nvme_written_bytes",
}


def first_row(configuration: Configuration, **known: Any) -> Row:
    return Row(
        name=configuration.name,
        strategy=configuration.strategy,
        stage=configuration.stage,
        settings=configuration.settings.model_copy(deep=True),
        network_how=configuration.network_how,
        **known,
    )


def apply_outcome(
    row: Row, outcome: Outcome, configuration: Configuration, reference: ReferenceRun | None
) -> list[Window]:
    """Fill ``row`` from a run that verified or measured or both; the windows that may be shown."""
    row.status, row.error, row.oom_tier = outcome.status, outcome.error, outcome.oom_tier
    if outcome.status != "ok":
        return []
    reports = by_rank(outcome.reports)
    row.dtypes = reports[0].dtypes
    verification = reports[0].verification
    if verification is not None:
        row.deviation, row.checksum = assess(reports, configuration, reference), verification.checksum
    elif row.deviation is None:
        row.deviation = Deviation(verdict="not verified: it trains nothing")
    found = exceeded(row.deviation) if row.deviation is not None else []
    if found and row.deviation is not None:
        row.status = "wrong"
        row.error = f"differs from {row.deviation.reference}: {describe(row.deviation, found[0])}"
        row.error += rate_hint(found, configuration.settings.optimizer["lr"])
        return []
    windows = [report.window for report in reports if report.window is not None]
    if fault := fault_of(windows):
        row.status, row.error = "failed", fault
        return []
    if windows:
        apply_windows(row, windows)
    return windows


def fault_of(windows: Sequence[Window]) -> str | None:
    """Return why a measured pass is not one of the row's strategy, or None if it is valid."""
    for number, losses in enumerate(zip(*(window.losses for window in windows), strict=True), start=1):
        if not all(map(math.isfinite, losses)):
            return (
                f"the loss of measured step {number} is not finite, so nothing is trained: give a lower --lr"
            )
    held_out = [window.validation_loss for window in windows if window.validation_loss is not None]
    if not all(map(math.isfinite, held_out)):
        return "the held-out loss after the measured steps is not finite, so nothing is trained: give a lower --lr"
    if windows and (skipped := windows[0].skipped_steps) and 2 * skipped >= len(windows[0].step_times_ms):
        return (
            f"fp16 overflow skipped the updates of {skipped} of the last {skipped + (windows[0].applied_steps or 0)} "
            "steps, so the median may be the time of a step without one: give more --warmup-steps for the loss scale "
            "to settle, or take bf16"
        )
    if windows and windows[0].compiled_graphs == 0:
        return (
            "torch.compile compiled nothing of it, so this row would be eager: remove --compile, or use its "
            "other mode"
        )
    return None


def by_rank(reports: Mapping[int, Report]) -> list[Report]:
    return [reports[rank] for rank in sorted(reports)]


def assess(
    reports: Sequence[Report], configuration: Configuration, reference: ReferenceRun | None
) -> Deviation:
    """Compare with the reference. Tensors were compared by rank 0; losses are averaged over ranks here."""
    verification = reports[0].verification
    assert verification is not None
    group = configuration.checksum_group()
    if reference is None:
        return Deviation(checksum_group=group, verdict="is the reference")
    tensors = verification.deviation
    assert tensors is not None
    losses = [report.verification.loss for report in reports if report.verification is not None]
    norm = None
    if verification.norm is not None and reference.norm is not None:
        norm = relative(verification.norm, reference.norm)
    reads, reads_worst = worst_reads(reports)
    deviation = Deviation(
        reference=reference.name,
        loss=relative(fmean(losses), reference.loss),
        norm=norm,
        evaluation=worst_evaluation(reports),
        reads=reads,
        reads_worst=reads_worst,
        **tensors.model_dump(),
        tolerance=tolerances(
            tolerance_precision(configuration.settings.precision, reports[0].dtypes),
            loss_dtype=verification.loss_dtype,
            reference_loss_dtype=reference.loss_dtype,
        ),
        checksum_group=group,
    )
    found = exceeded(deviation)
    layers, of = reference.model["num_layers"], configuration.model["num_layers"]
    on = " without dropout" if configuration.settings.dropout else ""
    on += "" if layers == of else f" with {layers} of {of} layers, {reference.why_fewer_layers}"
    deviation.verified_layers = None if layers == of else layers
    experts = reference.model.get("experts_per_token")
    if experts != configuration.model.get("experts_per_token"):
        on += f" with all {experts} experts for every token"
        deviation.verified_experts_per_token = experts
    steps = f"{reference.name} on the same global batches, step 1 and {VERIFY_STEPS} steps{on}"
    deviation.verdict = (
        f"differs from {steps}: {', '.join(describe(deviation, name) for name in found)}"
        if found
        else f"as {steps}"
    )
    return deviation


def worst_evaluation(reports: Sequence[Report]) -> float | None:
    """Over ranks, each of which evaluated a batch of its own; None where one could not."""
    verifications = [report.verification for report in reports if report.verification is not None]
    pairs = zip(verifications, verifications[0].expected_evaluations, strict=False)
    found = [
        None if own.evaluation is None else relative(own.evaluation, expected) for own, expected in pairs
    ]
    known = [deviation for deviation in found if deviation is not None]
    return max(known, key=nan_last) if known and len(known) == len(verifications) else None


def worst_reads(reports: Sequence[Report]) -> tuple[float | None, str | None]:
    found = [
        (report.verification.reads, f"{report.verification.reads_worst} on rank {rank}")
        for rank, report in enumerate(reports)
        if report.verification is not None and report.verification.reads is not None
    ]
    share, where = max(found, key=lambda one: one[0], default=(None, None))
    return share, where if share else None


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-30)


def apply_windows(row: Row, windows: Sequence[Window]) -> None:
    """Figures of the measured window over all ranks; a further repeat adds its samples and raises the peaks."""
    samples = step_times_of_all([window.step_times_ms for window in windows])
    earlier = row.step_time_ms.samples if row.step_time_ms else []
    apply_times(row, [*earlier, *samples])
    assert row.step_time_ms is not None
    settings = row.settings
    step_s = row.step_time_ms.median / 1e3
    memories = [window.memory for window in windows]
    add_run(row, run_of(row, windows, step_ms=median(samples)))
    row.peak_device_bytes = largest([row.peak_device_bytes, *(memory.peak_bytes for memory in memories)])
    for name in ("torch_allocated_peak_bytes", "torch_reserved_peak_bytes", "outside_torch_bytes"):
        setattr(row, name, largest([getattr(row, name), *(getattr(memory, name) for memory in memories)]))
    row.peak_host_bytes = largest([row.peak_host_bytes, *(window.peak_host_bytes for window in windows)])
    if windows[0].skipped_steps is not None:
        row.skipped_steps = (row.skipped_steps or 0) + windows[0].skipped_steps
    if earlier:
        if row.transfers is not None:
            row.transfers.achieved_gb_s = achieved_gb_s(row.transfers, step_s=step_s)
        return
    row.rank_step_times_ms = [median(window.step_times_ms) for window in windows]
    row.loss = finite([fmean(step) for step in zip(*(window.losses for window in windows), strict=True)])
    held_out = [window.validation_loss for window in windows if window.validation_loss is not None]
    row.validation_loss = fmean(held_out) if held_out else None
    row.allocated_device_bytes = largest([memory.allocated_bytes for memory in memories])
    row.compiled_graphs = windows[0].compiled_graphs
    row.compile_s = compile_s(row, windows, step_s=median(samples) / 1e3)
    moved = [window.communication_bytes for window in windows if window.communication_bytes is not None]
    row.communication_by_collective = max(moved, key=lambda bytes_: sum(bytes_.values()), default=None)
    if row.communication_by_collective is not None:
        row.communication_bytes = sum(row.communication_by_collective.values())
    row.collectives = collectives_of(windows)
    for name in ("activation_bytes", "activation_and_shard_bytes"):
        setattr(row, name, largest([getattr(window, name) for window in windows]))
    apply_energy(row, windows)
    row.transfers = transfers_of(windows, step_s=step_s)
    row.memory_bytes = largest_by_category([window.memory_bytes for window in windows])
    phases = {phase for window in windows for phase in window.phases_ms}
    row.phases_ms = {
        phase: fmean(window.phases_ms.get(phase, 0.0) for window in windows)
        for phase in (
            "forward",
            "backward",
            "optimizer",
            *sorted(phases - {"forward", "backward", "optimizer"}),
        )
        if phase in phases
    }
    row.device_busy_pct = device_busy_pct(windows)
    apply_bubble(row, windows)
    settings.threads_per_rank = windows[0].threads
    settings.communicator = windows[0].communicator
    for name in ("binding", "update_cpus"):
        known = [value for window in windows if (value := getattr(window, name)) is not None]
        setattr(row, name, known or None)


def collectives_of(windows: Sequence[Window]) -> list[Collective] | None:
    """Return those of the rank that moves most, or None where no rank can tell."""
    known = [window.collectives for window in windows if window.collectives is not None]
    most = max(known, key=lambda found: sum(one.bytes for one in found), default=None)
    return None if most is None else [Collective(**one.model_dump()) for one in most]


def compile_s(row: Row, windows: Sequence[Window], *, step_s: float) -> float | None:
    """Return the time that the first steps of the slowest rank took beyond as many usual steps, or None."""
    taken_s = [window.first_steps_s for window in windows if window.first_steps_s is not None]
    if row.settings.compile == "none" or not taken_s:
        return None
    return max(max(taken_s) - (row.settings.warmup_steps - 1) * step_s, 0.0)


def apply_times(row: Row, samples: Sequence[float]) -> None:
    """Fill in the step time and the rates that follow from it."""
    row.step_time_ms = summarise(samples)
    settings = row.settings
    step_s = row.step_time_ms.median / 1e3
    row.samples_per_s = settings.world_size * settings.batch_size * settings.grad_accum / step_s
    row.tokens_per_s = row.samples_per_s * settings.seq_length


def run_of(row: Row, windows: Sequence[Window], *, step_ms: float) -> Run:
    """Return the figures of one run, given the windows of its ranks and its median step time."""
    return Run(
        step_time_ms=step_ms,
        tokens_per_s=tokens_per_step(row) / (step_ms / 1e3),
        peak_device_bytes=largest([window.memory.peak_bytes for window in windows]),
        device_busy_pct=device_busy_pct(windows),
        energy_per_step_j=energy_per_step_j(windows),
    )


def device_busy_pct(windows: Sequence[Window]) -> float | None:
    """Return the mean over the ranks that know it, or None."""
    known = [window.device_busy_pct for window in windows if window.device_busy_pct is not None]
    return fmean(known) if known else None


def apply_turns(row: Row, turns: Turns) -> None:
    """Give the row the step time of its windows. Memory, phases, energy and losses stay those of the row alone."""
    row.turns = turns
    apply_times(row, [window for run in turns.windows_ms for window in run])
    set_runs(row, [run_of(row, [], step_ms=median(run)) for run in turns.windows_ms if run])
    if row.transfers is not None and row.step_time_ms is not None:
        row.transfers.achieved_gb_s = achieved_gb_s(row.transfers, step_s=row.step_time_ms.median / 1e3)


def energy_per_step_j(windows: Sequence[Window]) -> float | None:
    """Return the energy of a step over all ranks, or None unless each of them knows its own."""
    known = [window.energy_per_step_j for window in windows if window.energy_per_step_j is not None]
    return sum(known) or None if len(known) == len(windows) else None


def apply_bubble(row: Row, windows: Sequence[Window]) -> None:
    """Fill in the bubble of all ranks, against the longest schedule: a rank that ends early waits for the others."""
    busy_ms = [window.schedule_busy_ms for window in windows if window.schedule_busy_ms is not None]
    whole_ms = [window.schedule_ms for window in windows if window.schedule_ms is not None]
    settings = row.settings
    if not (busy_ms and whole_ms and settings.pipeline_schedule):
        return
    assert settings.pipeline_stages is not None and settings.micro_batches is not None
    row.bubble_pct = 100 * (1 - fmean(busy_ms) / max(whole_ms))
    row.bubble_formula_pct = 100 * bubble_share(
        settings.pipeline_schedule, stages=settings.pipeline_stages, micro_batches=settings.micro_batches
    )


def apply_energy(row: Row, windows: Sequence[Window]) -> None:
    """Set the row's energy of a step over all ranks, and its tokens per joule, if each rank measured its own energy."""
    row.energy_per_step_j = energy_per_step_j(windows)
    if row.energy_per_step_j is None:
        return
    row.tokens_per_j = tokens_per_step(row) / row.energy_per_step_j


def step_times_of_all(ranks: Sequence[Sequence[float]]) -> list[float]:
    """From the moment in which the last rank ended a step to the moment in which the last one ended the next. Each
    rank's time counts from the beginning of its own window, so the sum is the slowest rank's window; the slowest rank
    of every single step would count what ranks run ahead of each other and fall back as time of the step."""
    ends = [max(step) for step in zip(*(accumulate(times) for times in ranks), strict=True)]
    return [end - begin for begin, end in pairwise([0.0, *ends])]


def transfers_of(windows: Sequence[Window], *, step_s: float) -> Transfers | None:
    """Return the transfers of the rank that moves most in each direction, with the limits of the slowest; None if no
    rank reported any."""
    found = [window.transfers for window in windows if window.transfers is not None]
    if not found:
        return None
    first = found[0]
    row = Transfers(
        offload_ratio=first.offload_ratio, io_engine=first.io_engine, chunk_numel=first.chunk_numel
    )
    for name in (*_MOVED.values(), "pinned_bytes", "pinned_requested_bytes"):
        setattr(row, name, largest([getattr(one, name) for one in found]))
    row.achieved_gb_s = achieved_gb_s(row, step_s=step_s)
    row.limit_note = next((one.limit_note for one in found if one.limit_note), None)
    directions = set.intersection(*(set(one.limit_gb_s) for one in found))
    row.limit_gb_s = {name: min(one.limit_gb_s[name] for one in found) for name in sorted(directions)} or None
    return row


def achieved_gb_s(transfers: Transfers, *, step_s: float) -> dict[str, float] | None:
    moved = {direction: getattr(transfers, name) for direction, name in _MOVED.items()}
    return {
        direction: bytes_ / step_s / 1e9 for direction, bytes_ in moved.items() if bytes_ is not None
    } or None


def largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def finite(values: list[float]) -> list[float] | None:
    return values if all(map(math.isfinite, values)) else None


def largest_by_category(ranks: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for rank in ranks:
        for tier, categories in rank.items():
            for category, amount in categories.items():
                known = result.setdefault(tier, {})
                known[category] = max(known.get(category, 0), amount)
    return result


def settle(results: Results) -> None:
    """Judge rows against each other: equal checksums where the design promises them, and dtypes. Rows are as their own
    runs left them: what this makes wrong loses its figures, and a later row may turn the vote."""
    settle_checksums(results.rows)
    settle_dtypes(results.rows)


def settle_checksums(rows: Sequence[Row]) -> None:
    """A minority checksum in a group is wrong; where there is no majority, nobody can be trusted. A row that was
    verified and failed later votes too."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.checksum and row.deviation and row.deviation.checksum_group and row.status != "wrong":
            groups.setdefault(row.deviation.checksum_group, []).append(row)
    for group in groups.values():
        counts: dict[str, int] = {}
        for row in group:
            counts[row.checksum or ""] = counts.get(row.checksum or "", 0) + 1
        top = max(counts.values())
        winners = [checksum for checksum, count in counts.items() if count == top]
        for row in group:
            if row.status != "ok":
                continue
            if len(counts) > 1 and (len(winners) > 1 or row.checksum != winners[0]):
                others = sorted({other.strategy for other in group if other.checksum != row.checksum})
                mark_wrong(
                    row,
                    f"parameters after {VERIFY_STEPS} steps are not bit for bit those of {', '.join(others)}",
                )


_FIGURES = (
    "step_time_ms", "turns", "runs", "over_runs", "rank_step_times_ms", "tokens_per_s", "samples_per_s",
    "tokens_per_s_per_peak_gb", "relative", "relative_low", "relative_high",
    "relative_uncertainty", "speedup", "memory_change_pct", "baseline", "loss", "validation_loss", "memory_bytes",
    "peak_device_bytes", "activation_bytes", "activation_and_shard_bytes", "memory_explained_pct",
    "allocated_device_bytes",
    "torch_allocated_peak_bytes", "torch_reserved_peak_bytes", "outside_torch_bytes", "device_used_peak_bytes",
    "device_busy_pct", "peak_device_pct", "scaling_efficiency",
    "device_utilisation_pct", "peak_host_bytes", "phases_ms", "communication_bytes", "communication_by_collective",
    "collectives", "compiled_graphs", "compile_s", "skipped_steps", "bubble_pct", "bubble_formula_pct", "transfers",
    "offload_practicality", "energy_per_step_j", "tokens_per_j", "sampled", "mfu", "of_compute_only", "busy", "verdict",
)  # fmt: skip


def mark_wrong(row: Row, why: str) -> None:
    """No figure is kept of a row that turned out wrong."""
    assert row.deviation is not None
    row.status, row.error, row.deviation.verdict = "wrong", why, why
    clear_figures(row)


def clear_figures(row: Row) -> None:
    for name in _FIGURES:
        setattr(row, name, None)


def settle_dtypes(rows: Sequence[Row]) -> None:
    """Rows whose dtypes differ from those of zerobench's rows of the same precision (of most rows, where there is none
    of them) are shown, not ranked."""
    by_precision: dict[str, list[Row]] = {}
    for row in rows:
        if row.dtypes is not None and row.strategy != FLOOR:
            by_precision.setdefault(row.settings.precision, []).append(row)
    for group in by_precision.values():
        judges = [row for row in group if row.strategy in OURS] or group
        top = usual_dtypes(judges)
        for row in group:
            key, alone = dtype_key(row), row.settings.world_size == 1
            # One rank reduces nothing, so its dtype of reduction is no difference.
            row.comparable = key is not None and (key == top or (alone and key[:-1] == top[:-1]))


def usual_dtypes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the dtypes of most rows. If several are as frequent, prefer those that reduce in the dtype of their
    parameters, which is the engine's default. The order of the rows does not matter."""
    counts = Counter(key for row in rows if (key := dtype_key(row)) is not None)

    def rank(key: tuple[str, ...]) -> tuple[int, bool, tuple[str, ...]]:
        return counts[key], key[0] == key[-1], key

    return max(counts, key=rank)


def dtype_key(row: Row) -> tuple[str, ...] | None:
    dtypes = row.dtypes
    return (dtypes.param, dtypes.compute, dtypes.master, dtypes.state, dtypes.reduce) if dtypes else None
