"""Clocks around the phases of a step. A profiled step has one; the timed ones run without."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class NoClock:
    """Stands in for PhaseClock in steps that nobody takes apart."""

    def lap(self, phase: str) -> None:
        pass


class Phases(dict[str, float]):
    """Milliseconds by phase, in ``laps_ms`` phase by phase as they followed each other, and in ``files_ms`` how long
    the host was blocked for files meanwhile, where it may be. ``began_ns``: when they began, in nanoseconds of
    ``time.perf_counter_ns``, where the host is the device."""

    laps_ms: list[tuple[str, float]]
    files_ms: float | None = None
    began_ns: int | None = None


class PhaseClock:
    """Host time by phase. The readers in ``exposed`` give the time since their last call that this rank only waited for
    communication, offloaded state or a disk; it moves from the phase that it fell into to a phase of its own, by the
    reader's name, so that the phases add up."""

    def __init__(self, exposed: Mapping[str, Callable[[], float]] | None = None) -> None:
        self.phases_ms = Phases({"forward": 0.0, "backward": 0.0, "optimizer": 0.0})
        self.phases_ms.laps_ms = []
        self._exposed = dict(exposed or {})
        for name, take_ms in self._exposed.items():
            self.phases_ms[name] = 0.0
            take_ms()
        self.phases_ms.began_ns = time.perf_counter_ns()
        self._last_s = self.phases_ms.began_ns / 1e9

    def lap(self, phase: str) -> None:
        """Everything since the last lap belongs to ``phase``."""
        now_s = time.perf_counter()
        elapsed_ms = (now_s - self._last_s) * 1e3
        self._last_s = now_s
        self.phases_ms.laps_ms.append((phase, elapsed_ms))
        for name, take_ms in self._exposed.items():
            exposed_ms = min(take_ms(), elapsed_ms)
            self.phases_ms[name] += exposed_ms
            elapsed_ms -= exposed_ms
        self.phases_ms[phase] += elapsed_ms


class DevicePhaseClock:
    """Time by phase on the current CUDA stream, waits for communication included. Nothing waits for the device until
    the phases are read; what the host only enqueues after the last lap belongs to no phase."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self.lap("start")

    def lap(self, phase: str) -> None:
        """Everything that the stream did since the last lap belongs to ``phase``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    @property
    def phases_ms(self) -> Phases:
        self._marks[-1][1].synchronize()
        phases = Phases({"forward": 0.0, "backward": 0.0, "optimizer": 0.0})
        phases.laps_ms = [
            (phase, start.elapsed_time(end))
            for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False)
        ]
        for phase, elapsed_ms in phases.laps_ms:
            phases[phase] += elapsed_ms
        return phases


class Clock(Protocol):
    """Anything that wants to know where phases end."""

    def lap(self, phase: str) -> None: ...


def phase_clock(
    device: torch.device, exposed: Mapping[str, Callable[[], float]] | None = None
) -> PhaseClock | DevicePhaseClock:
    """The clock of a profiled step. What is exposed on CUDA is a profiler's to tell, which sees every stream."""
    return DevicePhaseClock() if device.type == "cuda" else PhaseClock(exposed)
