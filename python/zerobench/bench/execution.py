"""The execution of one step of a comparison: what is started, and what became of it. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zerobench import models
from zerobench.bench.assess import (
    ReferenceRun,
    apply_outcome,
    apply_turns,
    apply_windows,
    by_rank,
    clear_figures,
    fault_of,
    first_row,
    largest,
    step_times_of_all,
)
from zerobench.bench.busy import use_by_others, why_busy
from zerobench.bench.jobs import JobMaker, rank_memory_bytes
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.launch.ranks import ProgressCallback
from zerobench.bench.launch.sibling import SiblingLauncher
from zerobench.bench.mfu import utilisation
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.fit import TooLarge, why_too_large
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.protocol.job import Job, Window
from zerobench.bench.room import Room
from zerobench.bench.sampler import Sampler, summarise
from zerobench.bench.schedule import Group, Step
from zerobench.bench.surroundings import Surroundings
from zerobench.bench.turns import Contender
from zerobench.errors import Error
from zerobench.results.schema import Row, Sampled, Try, Turns
from zerobench.results.verdicts import is_within_limit
from zerobench.strategies.catalogue import REFERENCE

UTILISATION_S = 2.0  # of a window, in which the driver's counter has enough readings

Track = Callable[[str], AbstractContextManager[ProgressCallback]]
"""Shows the progress of a run under its name."""


class FirstRun(NamedTuple):
    """Outcome of the first run of a row."""

    row: Row
    was_started: bool  # False where the row is too large or its reference did not run


class Sight(NamedTuple):
    """Readings that the sampler took of the machine while a row trained."""

    duration_s: float
    sampled: Sampled | None
    busy: str | None  # as Row.busy


class Execution:
    """Runs steps one at a time, and keeps the references that later steps are compared with."""

    def __init__(
        self,
        options: CompareOptions,
        *,
        host: Surroundings,
        launcher: Launcher,
        sampler: Sampler,
        data_digest: str | None,
        traces: Path | None = None,
    ) -> None:
        self.jobs = JobMaker(
            options=options,
            scratch=launcher.scratch,
            data_digest=data_digest,
            memory_available_bytes=host.memory_available_bytes,
            traces=traces,
        )
        self.options = options
        self._host = host
        self._launcher = launcher
        self._sampler = sampler
        self._references: dict[str, ReferenceRun] = {}

    def verify_and_measure(self, step: Step, *, log: Path, track: Track) -> FirstRun:
        """Return the row of a configuration that runs for the first time, in fresh processes."""
        row = first_row(step.configuration, status="failed")
        if step.configuration.refused:
            row.status, row.error = "skipped", step.configuration.refused
            return FirstRun(row, was_started=False)
        if too_large := why_not_started(step.configuration, options=self.options, host=self._host):
            row.status, row.error, row.oom_tier = "oom", too_large.reason, too_large.tier
            return FirstRun(row, was_started=False)
        reference = self.reference_of(step, log=log, track=track) if step.needs_reference else None
        if reference is not None and reference.error is not None:
            row.error = f"cannot be verified, since the reference did not run: {reference.error}"
            return FirstRun(row, was_started=False)
        with track(row.name) as on_progress:
            for job in self.jobs.passes(step, reference):
                outcome = self._launcher.run(job, log=log, on_progress=on_progress)
                self.add_machine_figures(row, apply_outcome(row, outcome, step.configuration, reference))
                if row.status != "ok":
                    break
        return FirstRun(row, was_started=True)

    def attempt(self, step: Step, *, value: int, log: Path, track: Track) -> Try:
        """Return whether a row fits at ``value`` of the searched setting, which ``step`` has, by a few steps in fresh
        processes."""
        configuration = step.configuration
        if too_large := why_not_started(configuration, options=self.options, host=self._host):
            return Try(value=value, status="oom", fits=False, error=too_large.reason, oom_tier=too_large.tier)
        began_s = time.monotonic()
        with track(f"{configuration.name}, trying {value}") as on_progress:
            outcome = self._launcher.run(self.jobs.attempt(step), log=log, on_progress=on_progress)
        windows = [report.window for report in outcome.reports.values() if report.window]
        peak_bytes = largest([window.memory.peak_bytes for window in windows])
        return Try(
            value=value,
            status=outcome.status,
            fits=outcome.status == "ok" and is_within_limit(peak_bytes, configuration.settings),
            peak_device_bytes=peak_bytes,
            error=outcome.error,
            oom_tier=outcome.oom_tier,
            duration_s=round(time.monotonic() - began_s, 3),
        )

    def measure_again(self, step: Step, row: Row, *, log: Path, track: Track) -> None:
        """Add the samples of one more measurement to ``row``, or take its figures away where that fails."""
        number = step.repeat + 1
        with track(f"{row.name} ({number})") as on_progress:
            outcome = self._launcher.run(self.jobs.measurement(step), log=log, on_progress=on_progress)
        windows = [report.window for report in by_rank(outcome.reports) if report.window]
        status, error = outcome.status, outcome.error
        if status == "ok" and (fault := fault_of(windows)):
            status, error = "failed", fault
        if status != "ok":
            row.status, row.error = status, f"repeat {number}: {error}"
            row.oom_tier = outcome.oom_tier
            clear_figures(row)
            return
        apply_windows(row, windows)
        self.add_machine_figures(row, windows)

    def seats(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that can be alive together, by what each of them used alone. None can whose ranks a launcher
        on several hosts started."""
        if self.options.host_ranks is not None:
            return []
        devices = [gpu.total_bytes for gpu in self.options.gpus]
        room = Room(device_bytes=min(devices, default=None), host_bytes=self._host.memory_available_bytes())
        return room.seats(rows)

    def contender(self, step: Step, row: Row, *, steps_per_window: int, log: Path) -> Contender:
        """Return ``row`` as one that takes turns, not started yet."""
        job = self.jobs.in_turn(step, row, steps_per_window=steps_per_window)
        return Contender(job, SiblingLauncher(self._launcher), log=log)

    def measure_window(
        self, step: Step, row: Row, *, steps_per_window: int, log: Path, on_progress: ProgressCallback
    ) -> tuple[Outcome, float | None]:
        """Measure one window in fresh processes, and mark ``row`` where the machine was busy meanwhile. Return the
        outcome and the mean time of a step in milliseconds, None where the run did not end well."""
        job = self.jobs.window(step, steps_per_window=steps_per_window)
        outcome = self._launcher.run(job, log=log, on_progress=on_progress)
        windows = [report.window for report in by_rank(outcome.reports) if report.window]
        if outcome.status == "ok" and (fault := fault_of(windows)):
            outcome = replace(outcome, status="failed", error=fault)
        if outcome.status != "ok":
            return outcome, None
        if row.busy is None:
            row.busy = self._sight(row, windows).busy
        times_ms = step_times_of_all([window.step_times_ms for window in windows])
        return outcome, sum(times_ms) / len(times_ms)

    def apply(self, row: Row, turns: Turns) -> None:
        """Give ``row`` the times of its windows, in place of those that it had alone."""
        apply_turns(row, turns)
        used = self.options.gpus[: row.settings.world_size]
        if row.mfu is not None:
            row.mfu = utilisation(row, used[0].name)

    def reference_of(self, step: Step, *, log: Path, track: Track) -> ReferenceRun:
        """Return the reference of the step's group, which runs once. It has fewer layers where all of them do not
        fit."""
        group = step.group.name
        if group not in self._references:
            model = self.jobs.verification_model(step)
            with track(f"reference of {step.configuration.name}") as on_progress:
                while True:
                    job = self.jobs.reference(step, model)
                    outcome = self._launcher.run(job, log=log, on_progress=on_progress)
                    config = models.from_dict(model)
                    if outcome.status != "oom" or config.num_layers == config.least_layers:
                        break
                    model = config.with_layers(config.num_layers // 2).model_dump()
            is_asked_for = self.options.verify_layers == model["num_layers"]
            why = "as --verify-layers asks" if is_asked_for else None
            self._references[group] = reference_run(job, outcome, why_fewer_layers=why)
        return self._references[group]

    def drop_reference(self, group: Group) -> None:
        """Remove the file of the group's reference, which is many times as large as the model. It runs again where a
        later row needs it."""
        run = self._references.pop(group.name, None)
        if run is not None and run.file is not None:
            Path(run.file).unlink(missing_ok=True)

    def add_machine_figures(self, row: Row, windows: Sequence[Window]) -> None:
        """Add what the sampler saw during the window, and utilisation against the GPUs' peak."""
        if not windows:
            return
        used = self.options.gpus[: row.settings.world_size]
        sight = self._sight(row, windows)
        seen = sight.sampled
        row.busy = row.busy or sight.busy
        if row.sampled is None:
            row.sampled = seen
            if seen is not None and sight.duration_s >= UTILISATION_S:
                row.device_utilisation_pct = seen.gpu_utilisation_pct
        elif seen is not None and seen.shared_gpus is not None:
            # Its memory may be in the peaks, which are of all repeats.
            row.sampled.shared_gpus = sorted({*(row.sampled.shared_gpus or ()), *seen.shared_gpus})
        peaks = [row.device_used_peak_bytes, seen.gpu_used_peak_bytes if seen else None]
        row.device_used_peak_bytes = largest(peaks)
        if used and row.peak_device_bytes is not None:
            row.peak_device_pct = 100.0 * row.peak_device_bytes / min(gpu.total_bytes for gpu in used)
        if len({gpu.name for gpu in used}) == 1:
            row.mfu = utilisation(row, used[0].name)

    def _sight(self, row: Row, windows: Sequence[Window]) -> Sight:
        """Return what the sampler saw of the machine while the ranks of ``row`` trained ``windows``."""
        begin_s, end_s = min(w.began_s for w in windows), max(w.ended_s for w in windows)
        gpu_num = len(self.options.gpus[: row.settings.world_size])
        around = self._sampler.around(begin_s, end_s)
        within = [sample for sample in around if begin_s <= sample["time_s"] <= end_s]
        others = use_by_others(around, begin_s=begin_s, end_s=end_s)
        sampled = summarise(within, begin_s=begin_s, gpu_num=gpu_num, others=others)
        nearest = sampled or summarise(around[-1:], begin_s=begin_s, gpu_num=gpu_num)
        busy = why_busy(others, nearest.shared_gpus if nearest else None)
        return Sight(duration_s=end_s - begin_s, sampled=sampled, busy=busy)


def why_not_started(
    configuration: Configuration, *, options: CompareOptions, host: Surroundings
) -> TooLarge | None:
    """Return why a row is out of memory before anything of it starts, or None."""
    too_large = why_too_large(
        configuration,
        memory_available_bytes=host.memory_available_bytes(),
        rank_memory_bytes=rank_memory_bytes(options),
        gpus=options.gpus,
        host_ranks=options.host_ranks,
    )
    if too_large is None and (reason := host.why_not_lockable(configuration)):
        return TooLarge(reason, "host")
    return too_large


def reference_run(job: Job, outcome: Outcome, *, why_fewer_layers: str | None) -> ReferenceRun:
    if outcome.status != "ok":
        return ReferenceRun(model=job.verify_model, error=f"{outcome.status}: {outcome.error}")
    verification = outcome.reports[0].verification
    if verification is None:
        raise Error("the reference reported no verification: this is a bug of zerobench")
    run = ReferenceRun(
        name=REFERENCE if job.strategy == REFERENCE else f"{REFERENCE} under autocast",
        model=job.verify_model,
        file=job.reference_file,
        loss=verification.loss,
        norm=verification.norm,
        loss_dtype=verification.loss_dtype,
    )
    return run if why_fewer_layers is None else replace(run, why_fewer_layers=why_fewer_layers)
