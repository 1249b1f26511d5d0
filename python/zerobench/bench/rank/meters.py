"""How a rank's device is timed and weighed: host clocks and counted allocations on CPU ranks, events and the driver's
count of memory on a GPU. A meter lives as long as its rank, made before the first tensor."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from zerobench import _native
from zerobench.bench.protocol.job import DeviceMemory
from zerobench.bench.rank.intervals import Activity, Lap, busy_share, part_for_files, split
from zerobench.errors import ConfigError
from zerobench.host.nvml import Nvml
from zerobench.strategies.base import Batch, Strategy

Tick = Callable[[str, int], None]
Steps = Sequence[Sequence[Batch]]

_HEAD_START_CYCLES = 400_000  # some 0.2 ms on the device, in which the host begins to enqueue a profiled step
_HEAD_START_KERNEL = "spin_kernel"
_SETTLE_READINGS, _SETTLE_INTERVAL_S = 40, 0.05


class Profile(NamedTuple):
    """Figures of a step from a pass of profiled steps."""

    phases_ms: dict[str, float]  # the median over steps
    busy_pct: float | None = None  # of the step, with a kernel or a copy on the device


class Meter(ABC):
    """Clock, memory and energy of one rank.

    The calls around a window: ``settle``, perhaps steps, ``start``, a ``mark`` after each, ``stop``."""

    device: torch.device

    @abstractmethod
    def place(self, steps: Steps) -> Steps:
        """The batches where the strategy will read them, tensors that were one still one."""

    @abstractmethod
    def settle(self) -> None:
        """Let all earlier work of the device end."""

    @abstractmethod
    def start(self) -> None:
        """The window begins: peaks count from here."""

    @abstractmethod
    def mark(self) -> None:
        """A step has ended."""

    @abstractmethod
    def stop(self) -> list[float]:
        """Milliseconds from mark to mark, once all work has ended."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return the memory of the window that was just stopped."""

    def energy_j(self) -> float | None:
        """Return the joules that the device took since some fixed moment, or None if nothing counts them."""
        return None

    @abstractmethod
    def profile(self, strategy: Strategy, steps: Steps, tick: Tick) -> Profile:
        """Train ``steps`` with clocks of their own."""


class CpuMeter(Meter):
    """The process's own clock and allocator."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._core = _native.load()
        self._core.install_counting_allocator()
        self._marks_ns: list[int] = []

    def place(self, steps: Steps) -> Steps:
        return steps

    def settle(self) -> None:
        pass  # the device is the caller itself; what a strategy leaves to other threads, its own settle waits for

    def start(self) -> None:
        self._core.reset_process_usage_peak()
        self._marks_ns = [time.perf_counter_ns()]

    def mark(self) -> None:
        self._marks_ns.append(time.perf_counter_ns())

    def stop(self) -> list[float]:
        return [(end - begin) / 1e6 for begin, end in pairwise(self._marks_ns)]

    def memory(self) -> DeviceMemory:
        return DeviceMemory(
            peak_bytes=self._core.process_usage_peak_bytes(),
            allocated_bytes=self._core.process_usage_bytes(),
        )

    def profile(self, strategy: Strategy, steps: Steps, tick: Tick) -> Profile:
        found = []
        for index, batches in enumerate(steps):
            found.append(strategy.profiled_step(batches))
            tick("profile", index + 1)
        return Profile(median_phases(found))


class CudaMeter(Meter):
    """The rank's GPU: CUDA events, torch's allocator, and what the driver counts beside it."""

    def __init__(self, local_rank: int) -> None:
        visible = torch.cuda.device_count()
        if local_rank >= visible:
            raise ConfigError(
                f"local rank {local_rank} sees {visible} GPU{'s' if visible != 1 else ''} and takes the one of its own "
                "number: let every rank of a host see all of its GPUs, one for each"
            )
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize()  # makes the context, whose memory is nobody's
        self._context_bytes = self._settled_outside_bytes()
        self._events: list[torch.cuda.Event] = []
        self._nvml = Nvml()
        self._uuid = str(torch.cuda.get_device_properties(self.device).uuid)

    def place(self, steps: Steps) -> Steps:
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(self.device, non_blocking=True)
            return moved[id(tensor)]

        return [[{key: move(tensor) for key, tensor in batch.items()} for batch in step] for step in steps]

    def settle(self) -> None:
        torch.cuda.synchronize()

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._events = []
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def stop(self) -> list[float]:
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(self._events)]

    def memory(self) -> DeviceMemory:
        outside = self.outside_bytes()
        allocated_peak = torch.cuda.max_memory_allocated()
        return DeviceMemory(
            peak_bytes=allocated_peak + outside,
            allocated_bytes=torch.cuda.memory_allocated() + outside,
            torch_allocated_peak_bytes=allocated_peak,
            torch_reserved_peak_bytes=torch.cuda.max_memory_reserved(),
            outside_torch_bytes=outside,
        )

    def energy_j(self) -> float | None:
        return self._nvml.energy_j(self._uuid)

    def outside_bytes(self) -> int:
        """On the device now and outside torch's allocator, without the bare context."""
        return max(self._outside_bytes() - self._context_bytes, 0)

    def _outside_bytes(self) -> int:
        """Used on the device, by anyone, less what torch's allocator took from the driver."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def _settled_outside_bytes(self) -> int:
        """Once a process that has just ended here no longer gives memory back."""
        last = self._outside_bytes()
        for _ in range(_SETTLE_READINGS):
            time.sleep(_SETTLE_INTERVAL_S)
            now = self._outside_bytes()
            if now >= last:
                break
            last = now
        return last

    def profile(self, strategy: Strategy, steps: Steps, tick: Tick) -> Profile:
        """The first step is left out where there are others: the profiler itself begins in it."""
        if not steps:
            return Profile({})
        found = []
        with device_profiler() as profiler:
            for index, batches in enumerate(steps):
                head_start()
                found.append(strategy.profiled_step(batches))
                tick("profile", index + 1)
            torch.cuda.synchronize()
        offloads = strategy.settings.offload != "none"
        return read_profile(device_activities(profiler), found, offloads=offloads)


def head_start() -> None:
    """Keep the current stream busy while the host begins to enqueue a step, with a kernel that profiles show."""
    torch.cuda._sleep(_HEAD_START_CYCLES)


def is_head_start(name: str) -> bool:
    return _HEAD_START_KERNEL in name


def device_profiler() -> torch.profiler.profile:
    """A profile without CPU activities: recording every operation would make the host late, and that is what is
    asked."""
    # acc_events: or torch warns that it forgets earlier cycles.
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)


def device_activities(profiler: Any) -> list[Activity]:
    """Kernels and copies that a profile saw; times in microseconds."""
    return [
        Activity(name=event.name, begin=event.time_range.start, end=event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.profiler.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
    ]


def read_profile(
    activities: Sequence[Activity], steps: Sequence[Mapping[str, float]], *, offloads: bool = False
) -> Profile:
    """The medians over steps but the first, of steps that each followed a head start kernel and timed their own laps.
    Where the profile saw none of them, phases are as the steps timed them, waits included."""
    starts = sorted(a.end for a in activities if is_head_start(a.name))
    if len(starts) != len(steps):
        return Profile(median_phases(steps[1:] or steps))
    work = [activity for activity in activities if not is_head_start(activity.name)]
    found, busy = [], []
    for begin, phases in zip(starts, steps, strict=True):
        laps = laps_from(begin, phases)
        inside = [a for a in work if laps and a.end > laps[0].begin and a.begin < laps[-1].end]
        times_ms = {phase: time_us / 1e3 for phase, time_us in split(inside, laps, offloads=offloads).items()}
        found.append(part_for_files(times_ms, getattr(phases, "files_ms", None)))
        if laps and laps[-1].end > begin:
            busy.append(busy_share(inside, begin, laps[-1].end))
    busy_pct = 100.0 * median(busy[1:] or busy) if busy else None
    return Profile(median_phases(found[1:] or found), busy_pct)


def laps_from(begin: float, phases: Mapping[str, float]) -> list[Lap]:
    """A step's laps on the profile's clock, which counts microseconds."""
    laps: list[Lap] = []
    for phase, elapsed_ms in getattr(phases, "laps_ms", phases.items()):
        end = begin + elapsed_ms * 1e3
        laps.append(Lap(phase=phase, begin=begin, end=end))
        begin = end
    return laps


def median_phases(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for phases in steps:
        for phase, milliseconds in phases.items():
            samples.setdefault(phase, []).append(milliseconds)
    return {phase: median(values) for phase, values in samples.items()}


def open_meter(device: str, *, local_rank: int) -> Meter:
    return CudaMeter(local_rank) if device == "cuda" else CpuMeter()
