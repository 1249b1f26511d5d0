"""CPU use of other processes while a row was measured, from the sampler's readings. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerobench.results.sizes import join_words

BUSY_PCT = 10.0  # of the cores' time
LEAST_S = 1.0  # the kernel counts in ticks, of which a shorter time holds too few


class OtherUse(NamedTuple):
    """CPU time that other processes took of the command's cores."""

    cores: float  # as many as they kept busy, on average
    of: int

    @property
    def pct(self) -> float:
        return 100.0 * self.cores / self.of


def use_by_others(samples: Sequence[dict[str, Any]], *, begin_s: float, end_s: float) -> OtherUse | None:
    """Return what others took from the last reading before a window to the first one after it, or of a second where
    that is longer; None where there are no two readings."""
    readings = [sample for sample in samples if sample.get("cpu_times")]
    if not readings:
        return None
    after = next((reading for reading in readings if reading["time_s"] >= end_s), readings[-1])
    latest_s = min(begin_s, after["time_s"] - LEAST_S)
    earlier = [reading for reading in readings if reading["time_s"] <= latest_s]
    before = earlier[-1] if earlier else readings[0]
    passed_s = after["time_s"] - before["time_s"]
    if passed_s <= 0:
        return None
    used_s = after["cpu_times"]["others_s"] - before["cpu_times"]["others_s"]
    return OtherUse(max(used_s, 0.0) / passed_s, after["cpu_times"]["cpu_num"])


def why_busy(use: OtherUse | None, shared_gpus: Sequence[int] | None) -> str | None:
    """Return how much others used where that disturbs a measurement, else None."""
    used = []
    if use is not None and use.pct > BUSY_PCT:
        used.append(f"{use.cores:.1f} of {use.of} cores")
    if shared_gpus:
        used.append(f"GPU {join_words([str(gpu) for gpu in shared_gpus])}")
    return f"other processes used {join_words(used)}" if used else None
