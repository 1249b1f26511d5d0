"""One step of a strategy as a trace. The step follows another that is recorded too: what that one leaves under way
belongs to the picture, and profilers begin in it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from zerobench.bench.protocol.job import Job
from zerobench.bench.rank.intervals import Interval, Lap, merged, subtracted
from zerobench.bench.rank.meters import device_profiler, head_start, is_head_start, laps_from
from zerobench.bench.rank.trace_file import (
    COMMUNICATION,
    COMPUTE,
    CPU_ADAM,
    GATHER,
    IO,
    REDUCE,
    TO_DEVICE,
    TO_HOST,
    UPDATE,
    WAITS,
    Span,
    Trace,
    clipped,
    lane_of_activity,
    write_trace,
)
from zerobench.bench.rank.unit_marks import UnitMarks
from zerobench.strategies.base import Batch, Strategy
from zerobench.strategies.shared import torch_device

Recorded = Sequence[tuple[str, str, str, int, int]]

LANE_OF_STREAM = {"gather": GATHER, "reduce": REDUCE, "to_host": TO_HOST, "from_host": TO_DEVICE}
_COLLECTIVES = "collectives"
_SAME_WORK_NS = 20_000  # a pause between two operators that is no wait


def leave_trace(job: Job, strategy: Strategy, batches: Sequence[Batch]) -> None:
    """Train two steps, and have rank 0 write the trace of the second. A disk that takes no trace fails no row."""
    found = trace_step(strategy, batches)
    if strategy.settings.rank != 0 or job.trace_file is None:
        return
    if found is None:
        print("torch.profiler did not see the beginning of the step: the row has no trace", flush=True)
        return
    spans, step_us = found
    trace = Trace(
        row=job.name,
        strategy=job.strategy,
        device=torch_device(strategy.settings).type,
        rank=0,
        step_us=step_us,
        spans=clipped(spans, step_us),
    )
    try:
        write_trace(Path(job.trace_file), trace)
    except OSError as error:
        print(f"{job.trace_file} cannot be written ({error.strerror}): the row has no trace", flush=True)


def trace_step(strategy: Strategy, batches: Sequence[Batch]) -> tuple[list[Span], float] | None:
    """Train two steps; return the operations around the second and its length in microseconds, or None where the
    profiler did not see it. Collective."""
    on_gpu = torch_device(strategy.settings).type == "cuda"
    return _trace_gpu(strategy, batches) if on_gpu else _trace_cpu(strategy, batches)


def lane_of_record(place: str, what: str) -> str:
    """Return the lane of what the core recorded."""
    if what.startswith("wait"):
        return WAITS
    if place == "disk":
        return IO
    if place == "update thread":
        return CPU_ADAM
    if what.startswith("all-gather"):
        return GATHER
    return REDUCE if what.startswith("reduce-scatter") else COMMUNICATION


def _marks_of(strategy: Strategy) -> UnitMarks | nullcontext[UnitMarks]:
    """Return marks that record, or some that stay empty: compiled code calls no modules, and hooks might compile it
    anew."""
    marks = UnitMarks()
    return marks if strategy.settings.compile == "none" else nullcontext(marks)


def _two_steps(
    strategy: Strategy, batches: Sequence[Batch], marks: UnitMarks
) -> tuple[Mapping[str, float], int]:
    """Train, and return the phases of the second step and when it was begun."""
    strategy.step(batches)
    if torch_device(strategy.settings).type == "cuda":
        head_start()
    marks.begin_step()
    called_ns = time.perf_counter_ns()
    phases = strategy.profiled_step(batches)
    strategy.settle()  # spans are recorded when they end
    return phases, called_ns


def _trace_cpu(strategy: Strategy, batches: Sequence[Batch]) -> tuple[list[Span], float]:
    to_epoch_ns = time.time_ns() - time.perf_counter_ns()
    with (
        strategy.record_timeline() as recorded,
        _marks_of(strategy) as marks,
        operator_profiler() if recorded is None else nullcontext() as profiler,
    ):
        phases, called_ns = _two_steps(strategy, batches, marks)
    began_ns = getattr(phases, "began_ns", None) or called_ns
    laps = [
        Lap(phase=lap.phase, begin=lap.begin * 1e3, end=lap.end * 1e3)
        for lap in laps_from(began_ns / 1e3, phases)
    ]
    if recorded is None:
        computing, others = operators(profiler, to_epoch_ns)
        away = subtracted([(laps[0].begin, laps[-1].end)], computing)
    else:
        others = [span_of_record(record, marks) for record in recorded]
        away = merged(
            (begin, end)
            for place, _, _, begin, end in recorded
            if place in (_COLLECTIVES, "computing thread")
        )
    return moved([*computing_spans(laps, marks, away), *others], began_ns), (laps[-1].end - began_ns) / 1e3


def span_of_record(record: tuple[str, str, str, int, int], marks: UnitMarks) -> Span:
    """Return what the core recorded. Gradients are reduced within the backward of their unit."""
    place, what, unit, begin_ns, end_ns = record
    lane = lane_of_record(place, what)
    if not unit and lane == REDUCE:
        unit = marks.unit_at(begin_ns)
    return Span(lane=lane, name=f"{what} {unit}".strip(), unit=unit, begin=begin_ns, end=end_ns)


def computing_spans(laps: Sequence[Lap], marks: UnitMarks, away: Sequence[Interval]) -> list[Span]:
    """Return what the calling thread computed: phases by unit, without the times that it was ``away``."""
    spans = []
    for lap in laps:
        is_update = lap.phase == "optimizer"
        parts = [("", (lap.begin, lap.end))] if is_update else marks.split(lap.begin, lap.end)
        for unit, interval in parts:
            for begin, end in subtracted([interval], away):
                name = f"{lap.phase} {unit}".strip()
                spans.append(
                    Span(lane=UPDATE if is_update else COMPUTE, name=name, unit=unit, begin=begin, end=end)
                )
    return spans


def moved(spans: Sequence[Span], began_ns: float) -> list[Span]:
    """Return spans of nanoseconds as spans of microseconds since the step began."""
    return [
        Span(
            lane=span.lane,
            name=span.name,
            unit=span.unit,
            begin=(span.begin - began_ns) / 1e3,
            end=(span.end - began_ns) / 1e3,
        )
        for span in spans
    ]


def operator_profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)


def operators(profiler: Any, to_epoch_ns: int) -> tuple[list[Interval], list[Span]]:
    """Return when operators of torch ran, and the collectives of gloo, in nanoseconds of the host's clock."""
    running, collectives = [], []
    for event in profiler.profiler.kineto_results.events():
        begin = event.start_ns() - to_epoch_ns
        end = begin + event.duration_ns()
        name = event.name()
        if name.startswith("gloo:"):
            collectives.append(Span(lane=COMMUNICATION, name=name, begin=begin, end=end))
        elif name.startswith("aten::"):
            running.append((begin, end + _SAME_WORK_NS))
    return [(begin, end - _SAME_WORK_NS) for begin, end in merged(running)], collectives


def _trace_gpu(strategy: Strategy, batches: Sequence[Batch]) -> tuple[list[Span], float] | None:
    to_epoch_ns = time.time_ns() - time.perf_counter_ns()
    streams = strategy.streams()
    with (
        strategy.record_timeline() as recorded,
        _marks_of(strategy) as marks,
        device_profiler() as profiler,
    ):
        for handle in streams.values():  # a head start in each shows which of the profiler's streams it is
            with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
                head_start()
            torch.cuda.synchronize()
        phases, _ = _two_steps(strategy, batches, marks)
        torch.cuda.synchronize()
    events = list(profiler.profiler.kineto_results.events())
    on_device = [e for e in events if e.device_type() == torch.profiler.DeviceType.CUDA]
    starts = sorted((e for e in on_device if is_head_start(e.name())), key=lambda e: e.start_ns())
    if len(starts) != len(streams) + 1:
        return None
    began_ns = starts[-1].start_ns() + starts[-1].duration_ns()
    lanes = {
        start.device_resource_id(): LANE_OF_STREAM[name] for name, start in zip(streams, starts, strict=False)
    }
    units = LaunchUnits(events, recorded or [], marks, to_epoch_ns)
    spans = []
    for event in on_device:
        if is_head_start(event.name()) or event.is_user_annotation():
            continue
        lane = lane_of_activity(event.name(), lanes.get(event.device_resource_id()))
        begin, unit = event.start_ns(), units.of(event.correlation_id(), lane)
        spans.append(
            Span(lane=lane, name=event.name(), unit=unit, begin=begin, end=begin + event.duration_ns())
        )
    host = [span_of_record(r, marks) for r in recorded or [] if r[0] != _COLLECTIVES]
    host = moved(host, began_ns - to_epoch_ns)
    return [*moved(spans, began_ns), *host], laps_from(0.0, phases)[-1].end


class LaunchUnits:
    """The units that the host worked on when it launched kernels and copies."""

    def __init__(self, events: Sequence[Any], recorded: Recorded, marks: UnitMarks, to_epoch_ns: int) -> None:
        self._launched_ns = {
            event.correlation_id(): event.start_ns() - to_epoch_ns
            for event in events
            if event.device_type() == torch.profiler.DeviceType.CPU
        }
        self._collectives = [r for r in recorded if r[0] == _COLLECTIVES and r[2]]
        self._updates = sorted((r for r in recorded if r[0] == "update thread"), key=lambda r: r[3])
        self._marks = marks

    def of(self, correlation_id: int, lane: str) -> str:
        """Return the unit, or nothing where none is known: the optimizer of a device updates many at once."""
        launched_ns = self._launched_ns.get(correlation_id)
        if launched_ns is None or lane == UPDATE:
            return ""
        if lane == TO_DEVICE:  # the update thread sends what it has just updated
            last = bisect_right(self._updates, launched_ns, key=lambda r: r[3]) - 1
            _, what, unit, _, end_ns = self._updates[last] if last >= 0 else ("", "", "", 0, 0)
            if what == "adam" and end_ns <= launched_ns:
                return unit
        inside = (unit for _, _, unit, begin, end in self._collectives if begin <= launched_ns <= end)
        return next(inside, None) or self._marks.unit_at(launched_ns)
