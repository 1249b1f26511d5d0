"""The warning that training waits for files."""

from __future__ import annotations

from typing import Any

import pytest

from zerobench.engine.notices import Notices
from zerobench.engine.swap_watch import SwapWatch


class Clock:
    """An engine on a clock of its own: each step takes so long, waits so long and moves so much."""

    def __init__(self, *, step_s: float, waited_s: float, moved_bytes: int):
        self.step_s, self.waited_s, self.moved_bytes = step_s, waited_s, moved_bytes
        self.steps = 0

    def now_s(self) -> float:
        return 100 + self.steps * self.step_s

    def swap_stats(self) -> dict[str, Any]:
        return {
            "read_bytes": self.steps * self.moved_bytes // 2,
            "written_bytes": self.steps * self.moved_bytes // 2,
        }

    def offload_waited_for_files_ms(self) -> float:
        return self.steps * self.waited_s * 1e3


def told(engine: Clock, caplog: pytest.LogCaptureFixture, *, steps: int = 8) -> list[tuple[int, str]]:
    """Return the messages, each with the step after which it came."""
    found = []
    watch: SwapWatch | None = SwapWatch(["/a", "/b", "/a"], Notices(4), clock_s=engine.now_s)
    for step in range(1, steps + 1):
        engine.steps = step
        caplog.clear()
        if watch is not None and not watch.step_ended(engine):
            watch = None
        found += [(step, record.getMessage()) for record in caplog.records]
    assert watch is None
    return found


def test_a_step_that_waits_for_files_is_told_of_once(caplog) -> None:
    (step, text), *more = told(Clock(step_s=20.0, waited_s=15.0, moved_bytes=40_000_000_000), caplog)
    assert step == SwapWatch.first_steps + SwapWatch.watched_steps and not more
    for part in (
        "[rank 4] a step takes 20 s",
        "/a and /b for 15 s",
        "40 GB a step",
        "(2 GB/s)",
        "host_memory_bytes",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("waited_s", "moved_bytes"), [(0.4, 1 << 30), (0.0, 1 << 30), (0.9, 0)], ids=["less", "none", "no files"]
)
def test_nothing_is_told_where_files_are_not_the_limit(waited_s, moved_bytes, caplog) -> None:
    assert not told(Clock(step_s=1.0, waited_s=waited_s, moved_bytes=moved_bytes), caplog)
