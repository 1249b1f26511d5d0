"""Jobs of the ranks in each step of a comparison. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerobench.bench.assess import ReferenceRun
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.fit import verification_model
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.protocol.job import Job
from zerobench.bench.rank.trace_file import trace_path
from zerobench.bench.schedule import Step
from zerobench.results.schema import Row
from zerobench.results.settings import Settings, reference_values
from zerobench.results.sizes import GIB
from zerobench.strategies.catalogue import AUTOCAST_REFERENCE, FLOOR, REFERENCE

TRY_WARMUP_STEPS, TRY_STEPS = 1, 2  # of a try of --find


@dataclass(frozen=True, kw_only=True)
class JobMaker:
    """Makes the jobs of a comparison. ``scratch`` is the folder for reference files, and ``memory_available_bytes``
    what the host has available at a time."""

    options: CompareOptions
    scratch: Path
    data_digest: str | None
    memory_available_bytes: Callable[[], int]
    traces: Path | None = None  # folder for the trace of each row's first measurement

    def passes(self, step: Step, reference: ReferenceRun | None) -> list[Job]:
        """Return the jobs of a row's first run, in order.

        On GPUs verification has processes of its own: what it sets and leaves behind on a device cannot reach the
        measured pass. On CPU ranks a second start would cost more than it keeps apart."""
        if step.configuration.strategy == FLOOR:
            jobs = [self.measurement(step)]
        elif step.configuration.settings.device == "cpu":
            jobs = [self._row(step, reference, verify=True, measure=True)]
        else:
            jobs = [
                self._row(step, reference, verify=True, measure=False),
                self._row(step, reference, verify=False, measure=True),
            ]
        if self.traces is not None:
            trace_file = str(trace_path(self.traces.resolve(), step.configuration.name))
            jobs[-1] = jobs[-1].model_copy(update={"trace_file": trace_file})
        return jobs

    def measurement(self, step: Step) -> Job:
        """Return a job that measures and does not verify."""
        return self._row(step, None, verify=False, measure=True)

    def in_turn(self, step: Step, row: Row, *, steps_per_window: int) -> Job:
        """Return the job of a row that stays alive and takes turns. Other rows lie beside it on the device, so a share
        of offloaded state that was found alone is given to it."""
        job = self._row(step, None, verify=False, measure=False)
        settings = job.settings
        if settings.offload_ratio == "auto" and row.transfers and row.transfers.offload_ratio is not None:
            settings = settings.model_copy(update={"offload_ratio": row.transfers.offload_ratio})
        return job.model_copy(update={"settings": settings, "steps_per_window": steps_per_window})

    def window(self, step: Step, *, steps_per_window: int) -> Job:
        """Return a job that measures one window in fresh processes, and nothing after it."""
        job = self.measurement(step)
        settings = job.settings.model_copy(update={"num_steps": steps_per_window})
        return job.model_copy(update={"settings": settings, "profile_steps": 0, "validation_batches": 0})

    def attempt(self, step: Step) -> Job:
        """Return a job that shows whether a row fits: a few steps, of which the first makes all state."""
        job = self.measurement(step)
        few = {
            "warmup_steps": min(job.settings.warmup_steps, TRY_WARMUP_STEPS),
            "num_steps": min(job.settings.num_steps, TRY_STEPS),
        }
        settings = job.settings.model_copy(update=few)
        return job.model_copy(update={"settings": settings, "profile_steps": 0, "validation_batches": 0})

    def reference(self, step: Step, model: dict[str, Any]) -> Job:
        """Return the job of one process that trains ``model`` on the global batches of the step's group."""
        configuration = step.configuration
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
            reference_file=str(self.scratch / f"{step.group.name}.pt"),
            timeout_s=self.options.timeout_s,
            data_digest=self.data_digest,
        )

    def verification_model(self, step: Step) -> dict[str, Any]:
        """Return the step's model, with fewer layers where the reference or the group's rows would not fit."""
        ranks = step.group.most_ranks
        return verification_model(
            step.configuration.model,
            memory_available_bytes=self.memory_available_bytes(),
            rank_memory_bytes=rank_memory_bytes(self.options),
            gpus=self.options.gpus,
            layers=self.options.verify_layers,
            rounded_tokens=rounded_tokens(step.configuration.settings),
            host_ranks=min(ranks, self.options.host_ranks or ranks),
            offloads=step.group.offloads,
        )

    def _row(self, step: Step, reference: ReferenceRun | None, *, verify: bool, measure: bool) -> Job:
        configuration = step.configuration
        return Job(
            name=configuration.name,
            kind="row",
            strategy=configuration.strategy,
            settings=configuration.settings,
            model=configuration.model,
            verify_model=reference.model if reference else self.verification_model(step),
            num_ranks=configuration.settings.world_size,
            verify=verify,
            measure=measure,
            reference_strategy=reference_strategy(configuration) if reference else None,
            reference_file=reference.file if reference else None,
            timeout_s=self.options.timeout_s,
            data_digest=self.data_digest,
            rank_memory_bytes=rank_memory_bytes(self.options),
            options=configuration.options,
            network_how=configuration.network_how,
            compile_cache=self._compile_cache(configuration),
        )

    def _compile_cache(self, configuration: Configuration) -> str | None:
        if configuration.settings.compile == "none":
            return None
        return str(self.scratch / f"compiled_{configuration.name}")


def reference_strategy(configuration: Configuration) -> str:
    return AUTOCAST_REFERENCE if configuration.runs_under_autocast else REFERENCE


def rank_memory_bytes(options: CompareOptions) -> int | None:
    return None if options.rank_memory_gib is None else round(options.rank_memory_gib * GIB)


def rounded_tokens(settings: Settings) -> int | None:
    """Return the tokens of a step over all ranks, or None in fp32: no rounding sends a token to another expert."""
    if settings.precision == "fp32" and not settings.tf32:
        return None
    return settings.world_size * settings.grad_accum * settings.batch_size * settings.seq_length
