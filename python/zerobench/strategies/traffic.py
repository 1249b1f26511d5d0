"""Collectives of one step by phase: how many, how many bytes, and how long the rank was in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerobench.strategies.clock import Clock


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The calls of one collective in one phase of a step, on this rank. None where it cannot be told."""

    phase: str
    name: str
    bytes: int
    calls: int | None = None
    ms: float | None = None  # that the rank was in them: not the part beside which it computed


@dataclass
class Count:
    """Counts since some moment."""

    bytes: int = 0
    calls: int = 0
    ms: float = 0.0


Read = Callable[[], Mapping[str, Count]]
"""Return what moved so far, by collective."""


class TrafficClock:
    """A clock that also notes which collectives moved how much in each phase, and when laps ended."""

    def __init__(self, clock: Clock, read: Read) -> None:
        self._clock, self._read = clock, read
        self._last = dict(read())
        self.counts: dict[tuple[str, str], Count] = {}
        self.laps_ns: list[tuple[int, str]] = []

    def lap(self, phase: str) -> None:
        """Everything since the last lap belongs to ``phase``."""
        self._clock.lap(phase)
        self.laps_ns.append((time.perf_counter_ns(), phase))
        now = dict(self._read())
        for name, count in now.items():
            before = self._last.get(name, Count())
            if count.bytes > before.bytes:
                found = self.counts.setdefault((phase, name), Count())
                found.bytes += count.bytes - before.bytes
                found.calls += count.calls - before.calls
                found.ms += count.ms - before.ms
        self._last = now

    def phase_at(self, moment_ns: int) -> str | None:
        """Return the phase of a moment of ``time.perf_counter_ns``, or None after the last lap."""
        return next((phase for end_ns, phase in self.laps_ns if moment_ns <= end_ns), None)
