"""A warning, after a few steps, that training waits for files: what `compare` predicts from a probe, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from zerobench.engine.notices import Notices


class Swapping(Protocol):
    """Methods of an engine that a SwapWatch calls."""

    def swap_stats(self) -> dict[str, Any]: ...

    def offload_waited_for_files_ms(self) -> float: ...


class _Reading(NamedTuple):
    at_s: float
    waited_s: float
    moved_bytes: int


class SwapWatch:
    """Looks at the steps behind the first ones, which allocate and record, and warns at most once."""

    first_steps: ClassVar[int] = 2
    watched_steps: ClassVar[int] = 3
    least_share: ClassVar[float] = 0.5  # of a step: files then take longer than all else in it

    def __init__(self, paths: Sequence[str], notices: Notices, *, clock_s: Callable[[], float]) -> None:
        self._notices = notices
        self._paths = list(dict.fromkeys(paths))
        self._clock_s = clock_s
        self._steps = 0
        self._begin: _Reading | None = None

    def step_ended(self, engine: Swapping) -> bool:
        """Count a step and return whether the watch needs the next ones, too."""
        self._steps += 1
        if self._steps < self.first_steps:
            return True
        if self._begin is not None and self._steps < self.first_steps + self.watched_steps:
            return True
        stats = engine.swap_stats()
        now = _Reading(
            self._clock_s(),
            engine.offload_waited_for_files_ms() / 1e3,
            stats["read_bytes"] + stats["written_bytes"],
        )
        if self._begin is None:
            self._begin = now
            return True
        if text := self.warning_text(self._begin, now):
            self._notices.warn(text)
        return False

    def warning_text(self, begin: _Reading, end: _Reading) -> str | None:
        """Return the warning about the steps between the two readings; None if files are not the limit."""
        step_s = (end.at_s - begin.at_s) / self.watched_steps
        waited_s = (end.waited_s - begin.waited_s) / self.watched_steps
        moved_bytes = (end.moved_bytes - begin.moved_bytes) / self.watched_steps
        if not moved_bytes or waited_s < self.least_share * step_s:
            return None
        paths = " and ".join(self._paths)
        rate = moved_bytes / step_s / 1e9
        return (
            f"a step takes {step_s:.2g} s and waits for files in {paths} for {waited_s:.2g} s of it: this rank reads "
            f"and writes {moved_bytes / 1e9:.2g} GB a step ({rate:.2g} GB/s). More host memory (host_memory_bytes), "
            "more or faster disks (nvme_path takes several) or more tokens a step (gradient accumulation) would make "
            "it less; `python -m zerobench bench io PATH` measures a disk"
        )
