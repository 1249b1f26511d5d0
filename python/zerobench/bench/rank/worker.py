"""Work of one rank: verify, then measure, then report. Runs in a fresh process forked by the fork server."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerobench import data, models, strategies
from zerobench.bench.protocol.channel import Channel
from zerobench.bench.protocol.job import Job, Report, Skipped, Window, WindowTransfers
from zerobench.bench.protocol.place import MachinePlace
from zerobench.bench.protocol.row_settings import row_settings
from zerobench.bench.protocol.tolerances import VERIFY_STEPS, tolerance_precision
from zerobench.bench.rank import measure, turns, verify
from zerobench.bench.rank.binding import Binding, bind_rank
from zerobench.bench.rank.limits import DeviceLimit, judge_host
from zerobench.bench.rank.meters import Meter, open_meter
from zerobench.bench.rank.tracing import leave_trace
from zerobench.bench.rank.transfers import file_limits, link_limits
from zerobench.errors import Error
from zerobench.host.machine import cpus_usable
from zerobench.results.schema import RowDtypes
from zerobench.strategies.base import Batch, ModelFactory, Strategy, StrategySettings
from zerobench.strategies.compiled import cache_in


@dataclass(kw_only=True)
class Place:
    """Place of this rank, from the environment that launchers set, and the cores that it was bound to."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str
    ports: tuple[str, ...]  # one a pass
    machine: MachinePlace
    binding: Binding | None = None
    scratch: Path | None = None  # for temporary files, removed with the comparison

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Place:
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment["LOCAL_WORLD_SIZE"]),
            rendezvous=environment["ZEROBENCH_RENDEZVOUS"],
            ports=tuple(environment["ZEROBENCH_PORTS"].split(",")),
            machine=MachinePlace.from_environment(environment),
        )


def run_rank(request: dict[str, Any], *, report_fd: int) -> int:
    """Run a job's part of this rank and say how it went; the exit code."""
    channel = Channel(
        report_fd, device=request["settings"]["device"], rank_memory_bytes=request["rank_memory_bytes"]
    )
    place = Place.from_environment(os.environ)
    place.scratch = Path(request.pop("scratch"))
    stack = (place.scratch / f"stack.{place.rank}").open("w")
    # A stalled rank is asked where it is.
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    try:
        outcome = run_job(Job.model_validate(request), place, channel)
    except BaseException as error:
        traceback.print_exc()
        channel.fail(error)
        return 1
    channel.send("report" if isinstance(outcome, Report) else "skipped", outcome)
    return 0


def run_job(job: Job, place: Place, channel: Channel) -> Report | Skipped:
    meter = open_meter(job.settings.device, local_rank=place.local_rank)
    if job.settings.device == "cuda":
        torch.set_float32_matmul_precision("high" if job.settings.tf32 else "highest")
    place.binding = bound(job, place)
    torch.set_num_threads(threads_of(job, place))
    torch.manual_seed(job.settings.seed)
    channel.tick("load", 0)
    strategy_class = strategies.get(job.strategy)
    asked = strategy_settings(job, place)
    reason = strategy_class.unplaced(asked) or strategy_class.unsupported(asked)
    if reason is None and job.verify and not strategy_class.updates:
        reason = f"{job.strategy} never changes parameters, so there is nothing to verify it by"
    if reason is not None:
        return Skipped(reason=reason)
    report = None
    verify_port, measure_port = place.ports
    if job.steps_per_window is not None:
        os.environ["MASTER_PORT"] = measure_port
        return in_turn(job, strategy_class, place, channel, meter, steps_per_window=job.steps_per_window)
    if job.verify:
        os.environ["MASTER_PORT"] = verify_port
        report = verified(job, strategy_class, place, channel, meter)
        gc.collect()  # what reference cycles keep of the first strategy must not count as memory of the second
    if job.measure:
        os.environ["MASTER_PORT"] = measure_port
        window, dtypes = measured(job, strategy_class, place, channel, meter)
        report = Report(dtypes=dtypes, verification=report.verification if report else None, window=window)
    if report is None:
        raise ValueError(f"job {job.name} asks neither for verification nor for measurement")
    return report


def threads_of(job: Job, place: Place) -> int:
    """This rank's share of the machine's cores. The reference takes as many as each of the ranks that it stands for,
    since the order of some sums, and so their rounding, depends on the number of threads."""
    if place.binding is not None:
        return len(place.binding.cpus)
    if job.kind == "reference" and job.settings.threads_per_rank is not None:
        return job.settings.threads_per_rank
    return max(1, cpus_usable() // place.machine.num_core_ranks)


def bound(job: Job, place: Place) -> Binding | None:
    if job.settings.bind == "none":
        return None
    num_ranks = place.machine.num_core_ranks
    uuids: list[str] = []
    if job.settings.device == "cuda":
        # Of ranks whose GPUs this one cannot see, it supposes that they are on its node: so no core is taken twice.
        sees_all = num_ranks == place.local_world_size
        indices = range(num_ranks) if sees_all else [place.local_rank] * num_ranks
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in indices]
    return bind_rank(place.machine.core_rank, num_ranks=num_ranks, gpu_uuids=uuids)


def strategy_settings(job: Job, place: Place, *, deterministic: bool = False) -> StrategySettings:
    """Return the settings of the measured pass, or of the deterministic one. Each has a rendezvous of its own."""
    settings = job.settings
    # The reference is one process that trains every rank's micro-batches, as if they were accumulated.
    ranks_per_process = settings.world_size // place.world_size
    return row_settings(
        settings,
        host_rank_num=place.machine.num_ranks,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        rendezvous=f"{place.rendezvous}-{'verify' if deterministic else 'measure'}",
        grad_accum=settings.grad_accum * ranks_per_process,
        timeout_s=job.timeout_s,
        deterministic=deterministic,
        cpus=None if place.binding is None else place.binding.cpus,
        options=job.options,
    )


@contextlib.contextmanager
def open_strategy(
    strategy_class: type[Strategy],
    settings: StrategySettings,
    build: ModelFactory,
    channel: Channel,
    meter: Meter,
) -> Iterator[tuple[Strategy, DeviceLimit]]:
    """A built strategy under its limit of memory, closed at the end; what went wrong inside wins over what goes wrong
    while closing."""
    strategy = strategy_class(settings)
    with DeviceLimit(settings.device_memory_bytes, meter) as limit:
        try:
            strategy.build(build)
            limit.count_outside()
            yield strategy, limit
        except BaseException as error:
            channel.fail(error)
            with contextlib.suppress(Exception):
                strategy.close()
            raise
        strategy.close()


def compile_cache(job: Job, place: Place) -> AbstractContextManager[object]:
    """Around passes that are timed: the row's own cache, so that its first run says what compiling takes."""
    if job.compile_cache is None:
        return contextlib.nullcontext()
    folder = Path(job.compile_cache)
    # Of another host the folder of the command is not there.
    return cache_in(
        folder if folder.parent.is_dir() or place.scratch is None else place.scratch / folder.name
    )


def model_factory(config: Mapping[str, Any], seed: int) -> ModelFactory:
    return partial(models.build, models.from_dict(config), seed)


def open_batches(
    job: Job, settings: StrategySettings, model: Mapping[str, Any]
) -> tuple[data.Dataset, Callable[[int], Sequence[Batch]]]:
    """The data, and this rank's micro-batches of a step."""
    dataset = models.open_batches(
        models.from_dict(model),
        job.settings.data,
        seed=job.settings.seed,
        seq_length=settings.seq_length,
        text_field=job.settings.text_field,
        tokens=job.settings.tokens,
        expected_digest=job.data_digest,
    )
    of_step = partial(
        dataset.micro_batches,
        rank=settings.rank,
        world_size=settings.world_size,
        batch_size=settings.batch_size,
        grad_accum=settings.grad_accum,
    )
    return dataset, of_step


def row_dtypes(strategy: Strategy, job: Job) -> RowDtypes:
    """The strategy's, with the mode that fp32 matrix products run in."""
    dtypes = RowDtypes(**vars(strategy.dtypes()))
    return (
        dtypes.model_copy(update={"compute": "tf32"})
        if job.settings.tf32 and dtypes.compute == "float32"
        else dtypes
    )


def verified(
    job: Job, strategy_class: type[Strategy], place: Place, channel: Channel, meter: Meter
) -> Report:
    """The verification pass, under deterministic algorithms and in a strategy of its own."""
    settings = strategy_settings(job, place, deterministic=True)
    reference_file = Path(job.reference_file) if job.reference_file else None
    dataset, of_step = open_batches(job, settings, job.verify_model)

    def held_out(rank: int) -> Batch:
        found = dataset.validation_batches(
            rank=rank, world_size=place.world_size, batch_size=settings.batch_size, num_batches=1
        )
        return meter.place([found])[0][0]

    build = model_factory(job.verify_model, job.settings.seed)
    with open_strategy(strategy_class, settings, build, channel, meter) as (strategy, _):
        channel.tick("verification", 0)
        initial = strategy.full_parameters() if job.kind == "reference" else {}
        evidence = verify.gather_evidence(
            strategy,
            lambda step: meter.place([of_step(step)])[0],
            held_out=held_out(place.rank),
            watch=job.kind == "row",
            keep=place.rank == 0,
            tick=lambda step: channel.tick("verification", step),
        )
        dtypes = row_dtypes(strategy, job)
    tick = partial(channel.tick, "verification", VERIFY_STEPS)
    if job.kind == "reference":
        assert reference_file is not None
        verify.write_reference(reference_file, evidence, initial)
        reference_file = None
    gc.collect()  # what the strategy left in reference cycles
    if meter.device.type == "cuda":
        torch.cuda.empty_cache()  # the comparison needs some of that memory
    verification = verify.verify_row(
        evidence,
        reference_file=reference_file,
        precision=tolerance_precision(settings.precision, dtypes),
        optimizer=settings.optimizer,
        is_first=place.rank == 0,
        device=meter.device,
        tick=tick,
    )
    if place.rank == 0 and job.reference_strategy is not None and evidence.evaluation is not None:
        verification.expected_evaluations = verify.evaluate_parameters(
            strategies.get(job.reference_strategy),
            settings,
            build,
            evidence.parameters,
            [held_out(rank) for rank in range(place.world_size)],
            tick=tick,
        )
    return Report(dtypes=dtypes, verification=verification)


def measured(
    job: Job, strategy_class: type[Strategy], place: Place, channel: Channel, meter: Meter
) -> tuple[Window, RowDtypes]:
    """The measured pass, as users train."""
    settings = strategy_settings(job, place)
    dataset, of_step = open_batches(job, settings, job.model)
    warmup_steps, num_steps = job.settings.warmup_steps, job.settings.num_steps
    steps = meter.place([of_step(step) for step in range(warmup_steps + num_steps + job.profile_steps)])
    held_out = dataset.validation_batches(
        rank=settings.rank,
        world_size=settings.world_size,
        batch_size=settings.batch_size,
        num_batches=job.validation_batches,
    )
    validation = meter.place([held_out])[0]
    build = model_factory(job.model, job.settings.seed)
    with (
        compile_cache(job, place),
        open_strategy(strategy_class, settings, build, channel, meter) as (strategy, limit),
    ):
        channel.tick("warm-up", 0)
        window = measure.measure(
            strategy,
            meter=meter,
            warmup=steps[:warmup_steps],
            window=steps[warmup_steps : warmup_steps + num_steps],
            validation=validation,
            profile=steps[warmup_steps + num_steps :],
            tick=channel.tick,
            built=limit.count_outside,
            trace=partial(leave_trace, job, strategy) if job.trace_file else None,
        )
        limit.judge(window.memory)
        judge_host(window.memory_bytes, settings.host_memory_bytes)
        window.binding = None if place.binding is None else str(place.binding)
        dtypes = row_dtypes(strategy, job)
    if job.settings.offload != "none":  # once all that the strategy held is free
        window.transfers = window.transfers or WindowTransfers()
        limits = window.transfers.limit_gb_s
        with contextlib.suppress(RuntimeError):  # of torch: no room for a probe is no fault of the row
            limits |= link_limits(meter.device)
        try:
            limits |= file_limits(
                job.settings.nvme_paths, options=job.options, rank_num=place.machine.num_ranks
            )
        except (Error, OSError) as error:
            window.transfers.limit_note = getattr(error, "strerror", None) or str(error)
    return window, dtypes


def in_turn(
    job: Job,
    strategy_class: type[Strategy],
    place: Place,
    channel: Channel,
    meter: Meter,
    *,
    steps_per_window: int,
) -> Report:
    """Train windows as the measured pass does, while other rows wait."""
    settings = strategy_settings(job, place)
    _, of_step = open_batches(job, settings, job.model)
    warmup_steps = job.settings.warmup_steps
    steps = meter.place([of_step(step) for step in range(warmup_steps + job.settings.num_steps)])
    build = model_factory(job.model, job.settings.seed)
    with (
        compile_cache(job, place),
        open_strategy(strategy_class, settings, build, channel, meter) as (strategy, limit),
    ):
        channel.tick("warm-up", 0)
        turns.take_turns(
            strategy,
            meter=meter,
            steps=steps,
            warmup_steps=warmup_steps,
            steps_per_window=steps_per_window,
            channel=channel,
            built=limit.count_outside,
        )
        dtypes = row_dtypes(strategy, job)
    return Report(dtypes=dtypes)
