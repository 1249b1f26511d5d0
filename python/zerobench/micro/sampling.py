"""Interleaved samples: each round measures every contender once, in an order that rotates. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from zerobench.results.stats import Ratio, median_of_ratios, summarise

SAMPLE_S = 5e-3  # one sample repeats its call until it lasts about this long
MAX_CALLS = 2000

Call = Callable[[], object]


def repeat(call: Call, call_num: int) -> None:
    for _ in range(call_num):
        call()


def seconds_per_call(call: Call, call_num: int, *, end: Call | None = None) -> float:
    return seconds_per_repeat(partial(repeat, call), call_num, end=end)


def seconds_per_repeat(
    repeat_call: Callable[[int], object], call_num: int, *, end: Call | None = None
) -> float:
    """Return the seconds per call of a function that makes so many calls by itself. `end` runs once after all of them
    and is part of their time."""
    start = time.perf_counter()
    repeat_call(call_num)
    if end is not None:
        end()
    return (time.perf_counter() - start) / call_num


def calls_per_sample(call_s: float, sample_s: float = SAMPLE_S) -> int:
    return max(1, min(MAX_CALLS, round(sample_s / max(call_s, 1e-9))))


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The first is another one each time, so that no contender always follows the same one."""
    shift = index % len(names)
    return [*names[shift:], *names[:shift]]


def speed_ratio(
    times_s: Mapping[str, Sequence[float]], ours: str, other: str, *, scale: float = 1.0
) -> Ratio:
    """How many times as fast ours is: the median over the pairs of (other's time * scale) / our time."""
    return median_of_ratios([value * scale for value in times_s[other]], times_s[ours])


def as_json(times_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Raw samples and their summary, in microseconds."""
    return {
        name: summarise([value * 1e6 for value in samples]).model_dump(mode="json")
        for name, samples in times_s.items()
    }
