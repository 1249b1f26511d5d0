"""The comparison from beginning to end: plan, launch, verify, measure, result. Imports no torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from zerobench import data
from zerobench.bench.assess import (
    ReferenceRun,
    apply_outcome,
    apply_windows,
    by_rank,
    clear_figures,
    fault_of,
    first_row,
    largest,
    settle,
)
from zerobench.bench.launch.environments import device_environment
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.mfu import utilisation
from zerobench.bench.output import OutputFolder
from zerobench.bench.plan.fit import TooLarge, verification_model, why_too_large
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.plan import Configuration, Plan
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.protocol.job import Job, Window
from zerobench.bench.sampler import Sampler, shared_warning, summarise
from zerobench.bench.swap.notes import why_not_lockable
from zerobench.errors import Error
from zerobench.host import interrupts
from zerobench.host.consoles import drop_stdout
from zerobench.host.machine import busy_warning, machine_facts, version_facts
from zerobench.report import advise, finish_rows, render_table
from zerobench.results.files import OutputError
from zerobench.results.rows import repeats_text
from zerobench.results.schema import Results, Row
from zerobench.results.settings import Settings, reference_values
from zerobench.results.sizes import GIB
from zerobench.strategies.catalogue import AUTOCAST_REFERENCE, FLOOR, REFERENCE

SAMPLER_START_S = 10.0


def run_comparison(
    plan: Plan, *, output_dir: Path | None, launcher: Launcher, console: Console, notes: Console
) -> int:
    """Run every configuration and report; the exit code. ``notes`` takes progress and warnings."""
    output = OutputFolder(output_dir)
    comparison = Comparison(plan, output, launcher)
    interrupted = False
    try:
        with launcher, comparison.sampler:
            comparison.look_around()
            for warning in comparison.results.warnings:
                notes.print(f"warning: {warning}", style="yellow", soft_wrap=True)
            with ProgressDisplay(notes, comparison.work()) as display:
                comparison.run(display)
    except KeyboardInterrupt:
        interrupts.ignore_further()
        interrupted = True
    except Exception:  # of a disk that is full, say: what was measured is shown
        show(comparison.results, console)
        raise
    try:
        with interrupts.deferred():
            if interrupted:  # perhaps before the last rows were written
                output.write_results(comparison.results)
            output.write_summary(comparison.results)
            output.write_plots(comparison.results)
    except KeyboardInterrupt:
        interrupts.ignore_further()
        interrupted = True
    finally:
        print_results(comparison.results, output.path, console)
    if interrupted:
        notes.print(
            f"interrupted: {kept_text(comparison.results.rows, len(plan.configurations))}; "
            f"see them again with `zerobench show {output.path}`",
            style="yellow",
            soft_wrap=True,
        )
        return interrupts.exit_code()
    return exit_code(comparison.results.rows)


def kept_text(rows: Sequence[Row], total: int) -> str:
    if not rows or rows[0].settings.repeats == 1:
        return f"{len(rows)} of {total} rows are complete and kept"
    return f"{len(rows)} of {total} rows are kept, with {repeats_text(rows)} repeats of those that are ok"


def exit_code(rows: list[Row]) -> int:
    """0 when what could run is right, 1 when a row is wrong or failed or nothing could run."""
    statuses = {row.status for row in rows}
    return 1 if statuses & {"wrong", "failed"} or "ok" not in statuses else 0


def print_results(results: Results, folder: Path, console: Console) -> None:
    try:
        show(results, console)
        console.print(f"\nresults in {folder}", soft_wrap=True, highlight=False)
    except OSError as error:
        drop_stdout()
        raise OutputError(
            f"the table cannot be written to standard output ({error.strerror}): it is in {folder / 'summary.txt'}"
        ) from None


def show(results: Results, console: Console) -> None:
    """The table and the advice."""
    console.print(render_table(results), crop=False)
    if not results.rows:
        return
    for sentence in advise(results):
        console.print(sentence, soft_wrap=True, highlight=False)


class Comparison:
    """The rows so far and what making the next ones takes."""

    def __init__(self, plan: Plan, output: OutputFolder, launcher: Launcher) -> None:
        self.plan = plan
        self.output = output
        self.launcher = launcher
        self.references: dict[str, ReferenceRun] = {}
        self.data_digest: str | None = None
        self.rows: list[Row] = []  # as their own runs left them; the results hold judged copies
        self.gpus = plan.options.gpus
        # On GPUs the samples stay beside the results.
        samples = (output.path if self.gpus else launcher.scratch) / "samples.jsonl"
        self.sampler = Sampler(samples, uuids=[gpu.uuid for gpu in self.gpus])
        busy = busy_warning()
        self.results = Results(
            created=now_text(),
            machine=machine_facts(self.gpus),
            versions=version_facts(gpus=bool(self.gpus)),
            command=shlex.join(sys.argv),
            warnings=[*plan.warnings, *([busy] if busy else [])],
        )
        self.results.machine["details"]["rank_environment"] = device_environment(plan.options.device)
        limit_gib = plan.options.rank_memory_gib
        self.rank_memory_bytes = None if limit_gib is None else round(limit_gib * GIB)

    def look_around(self) -> None:
        """Whether GPUs are in use while nothing of ours runs yet."""
        deadline_s = time.monotonic() + SAMPLER_START_S
        while self.gpus and time.monotonic() < deadline_s:
            sample = self.sampler.first()
            if sample is not None:
                warning = shared_warning(sample)
                self.results.warnings += [warning] if warning else []
                return
            time.sleep(0.05)

    def work(self) -> int:
        """Configurations to run, repeats and references included."""
        groups = {c.reference_group() for c in self.plan.configurations if self.needs_reference(c)}
        return len(self.plan.configurations) * self.plan.options.repeats + len(groups)

    def run(self, display: ProgressDisplay) -> None:
        """Interleaved over repeats, so that drift of the machine hits all rows alike."""
        self.output.write_results(self.results)  # by which a folder of data leaves out the folder of results
        self.data_digest = data.digest_of(self.plan.options.data)
        for repeat in range(self.plan.options.repeats):
            for index, configuration in enumerate(self.plan.configurations):
                if repeat == 0:
                    self.rows.append(self.make_row(configuration, display))
                    self.drop_reference(
                        configuration.reference_group(), later=self.plan.configurations[index + 1 :]
                    )
                else:
                    self.repeat_row(index, configuration, repeat, display)
                self.save()
        self.results.complete = True
        self.output.write_results(self.results)

    def save(self) -> None:
        """Rows are judged before anybody sees them: Ctrl-C may come at any moment, and what is there is shown then."""
        judged = self.results.model_copy(update={"rows": [row.model_copy(deep=True) for row in self.rows]})
        settle(judged)
        finish_rows(judged, self.plan.options.baseline)
        self.results.rows = judged.rows
        self.output.write_results(self.results)

    def make_row(self, configuration: Configuration, display: ProgressDisplay) -> Row:
        """Verify and measure one configuration in fresh processes."""
        rerun = rerun_command(configuration, self.plan.options)
        log = self.output.start_log(configuration.name, rerun=rerun)
        row = first_row(
            configuration,
            status="failed",
            started=now_text(),
            log=str(log.relative_to(self.output.path)),
            rerun=rerun,
        )
        start_s = time.monotonic()
        too_large = self.why_not_started(configuration)
        reference = None
        if too_large is None and self.needs_reference(configuration):
            reference = self.reference_of(configuration, display)
        if too_large is not None:
            row.status, row.error, row.oom_tier = "oom", too_large.reason, too_large.tier
            display.skip()
        elif reference is not None and reference.error is not None:
            row.error = f"cannot be verified, since the reference did not run: {reference.error}"
            display.skip()
        else:
            with display.task(configuration.name) as on_progress:
                for job in self.passes(configuration, reference):
                    outcome = self.launcher.run(job, log=log, on_progress=on_progress)
                    self.add_machine_figures(row, apply_outcome(row, outcome, configuration, reference))
                    if row.status != "ok":
                        break
        row.duration_s = round(time.monotonic() - start_s, 3)
        display.note(row)
        return row

    def why_not_started(self, configuration: Configuration) -> TooLarge | None:
        host_ranks = self.plan.options.host_ranks
        too_large = why_too_large(
            configuration, rank_memory_bytes=self.rank_memory_bytes, gpus=self.gpus, host_ranks=host_ranks
        )
        if too_large is None and (reason := why_not_lockable(configuration, host_ranks=host_ranks)):
            return TooLarge(reason, "host")
        return too_large

    def repeat_row(
        self, index: int, configuration: Configuration, repeat: int, display: ProgressDisplay
    ) -> None:
        """Measure an ok row once more; its samples join the others."""
        row = self.rows[index]
        if self.results.rows[index].status != "ok":
            display.skip()
            return
        job = self.job(configuration, None, verify=False, measure=True)
        with display.task(f"{row.name} ({repeat + 1})") as on_progress:
            outcome = self.launcher.run(job, log=self.output.log(row.name), on_progress=on_progress)
        windows = [report.window for report in by_rank(outcome.reports) if report.window]
        status, error = outcome.status, outcome.error
        if status == "ok" and (fault := fault_of(windows)):
            status, error = "failed", fault
        if status != "ok":
            row.status, row.error = status, f"repeat {repeat + 1}: {error}"
            row.oom_tier = outcome.oom_tier
            clear_figures(row)
            return
        apply_windows(row, windows)
        self.add_machine_figures(row, windows)

    def passes(self, configuration: Configuration, reference: ReferenceRun | None) -> list[Job]:
        """On GPUs verification has processes of its own: what it sets and leaves behind on a device cannot reach the
        measured pass. On CPU ranks a second start would cost more than it keeps apart."""
        if configuration.strategy == FLOOR:
            return [self.job(configuration, None, verify=False, measure=True)]
        if configuration.settings.device == "cpu":
            return [self.job(configuration, reference, verify=True, measure=True)]
        return [
            self.job(configuration, reference, verify=True, measure=False),
            self.job(configuration, reference, verify=False, measure=True),
        ]

    def add_machine_figures(self, row: Row, windows: Sequence[Window]) -> None:
        """What the sampler saw during the window, and utilisation against the GPUs' peak."""
        if not windows:
            return
        begin_s, end_s = min(w.began_s for w in windows), max(w.ended_s for w in windows)
        used = self.gpus[: row.settings.world_size]
        seen = summarise(self.sampler.between(begin_s, end_s), begin_s=begin_s, gpu_num=len(used))
        if row.sampled is None:
            row.sampled = seen
            row.device_utilisation_pct = seen.gpu_utilisation_pct if seen else None
        elif seen is not None and seen.shared_gpus is not None:
            # Its memory may be in the peaks, which are of all repeats.
            row.sampled.shared_gpus = sorted({*(row.sampled.shared_gpus or ()), *seen.shared_gpus})
        peaks = [row.device_used_peak_bytes, seen.gpu_used_peak_bytes if seen else None]
        row.device_used_peak_bytes = largest(peaks)
        if len({gpu.name for gpu in used}) == 1:
            row.mfu = utilisation(row, used[0].name)

    def needs_reference(self, configuration: Configuration) -> bool:
        """`single` alone in its group is the reference and has nothing to be compared with."""
        group = configuration.reference_group()
        return configuration.strategy != FLOOR and any(
            c.strategy not in (REFERENCE, FLOOR) and c.reference_group() == group
            for c in self.plan.configurations
        )

    def reference_of(self, configuration: Configuration, display: ProgressDisplay) -> ReferenceRun:
        """`single` on the group's global batches, run once; with fewer layers where all of them do not fit."""
        group = configuration.reference_group()
        if group not in self.references:
            model = self.verification_model(configuration)
            with display.task(f"reference of {configuration.name}") as on_progress:
                while True:
                    job = self.reference_job(configuration, model)
                    log = self.output.log(configuration.name)
                    outcome = self.launcher.run(job, log=log, on_progress=on_progress)
                    if outcome.status != "oom" or model["num_layers"] == 1:
                        break
                    model = {**model, "num_layers": model["num_layers"] // 2}
            asked = self.plan.options.verify_layers
            why = "as --verify-layers asks" if asked == model["num_layers"] else None
            self.references[group] = reference_run(job, outcome, why_fewer_layers=why)
        return self.references[group]

    def drop_reference(self, group: str, *, later: Sequence[Configuration]) -> None:
        """Its file is many times the model; nobody reads it after the group's last row."""
        run = self.references.get(group)
        if run is not None and run.file is not None and all(c.reference_group() != group for c in later):
            Path(run.file).unlink(missing_ok=True)

    def reference_job(self, configuration: Configuration, model: dict[str, object]) -> Job:
        return Job(
            name=f"reference of {configuration.name}",
            kind="reference",
            strategy=reference_strategy(configuration),
            settings=configuration.settings.model_copy(update=reference_values()),
            model=model,
            verify_model=model,
            num_ranks=1,
            verify=True,
            measure=False,
            reference_file=str(self.launcher.scratch / f"{configuration.reference_group()}.pt"),
            timeout_s=self.plan.options.timeout_s,
            data_digest=self.data_digest,
        )

    def verification_model(self, configuration: Configuration) -> dict[str, Any]:
        group = configuration.reference_group()
        compared = [row.settings for row in self.plan.configurations if row.reference_group() == group]
        ranks = max(settings.world_size for settings in compared)
        return verification_model(
            configuration.model,
            rank_memory_bytes=self.rank_memory_bytes,
            gpus=self.gpus,
            layers=self.plan.options.verify_layers,
            rounded_tokens=rounded_tokens(configuration.settings),
            host_ranks=min(ranks, self.plan.options.host_ranks or ranks),
            offloads=any(settings.offload != "none" for settings in compared),
        )

    def job(
        self, configuration: Configuration, reference: ReferenceRun | None, *, verify: bool, measure: bool
    ) -> Job:
        model = configuration.model
        return Job(
            name=configuration.name,
            kind="row",
            strategy=configuration.strategy,
            settings=configuration.settings,
            model=model,
            verify_model=reference.model if reference else self.verification_model(configuration),
            num_ranks=configuration.settings.world_size,
            verify=verify,
            measure=measure,
            reference_strategy=reference_strategy(configuration) if reference else None,
            reference_file=reference.file if reference else None,
            timeout_s=self.plan.options.timeout_s,
            data_digest=self.data_digest,
            rank_memory_bytes=self.rank_memory_bytes,
            options=configuration.options,
        )


def reference_strategy(configuration: Configuration) -> str:
    return AUTOCAST_REFERENCE if configuration.runs_under_autocast else REFERENCE


def rounded_tokens(settings: Settings) -> int | None:
    """Tokens of a step over all ranks; None in fp32, where no rounding sends a token to another expert."""
    if settings.precision == "fp32" and not settings.tf32:
        return None
    return settings.world_size * settings.grad_accum * settings.batch_size * settings.seq_length


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


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
