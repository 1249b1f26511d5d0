"""How many times as fast a row is as another, how sure that is, and words for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zerobench.results.rows import NOISE_SIGMAS, ratio_in_turn, step_rate, tokens_per_step
from zerobench.results.schema import Row
from zerobench.results.sizes import range_text
from zerobench.results.stats import ratio_error


class Pace(NamedTuple):
    """Tokens a second of a row over those of another, with the 95 % interval; None where too few steps tell."""

    value: float
    low: float | None = None
    high: float | None = None
    caveat: str = ""
    """How the two were measured, if they did not take turns: their interval leaves out how the machine changed."""

    @property
    def is_noise(self) -> bool:
        """True if the interval contains 1; False if there is no interval."""
        return self.low is not None and self.high is not None and self.low < 1 < self.high


def pace(row: Row, base: Row) -> Pace:
    """Compare rows within rounds if they took turns, else by their medians, which also differ by how the machine
    changed from one row to the next."""
    tokens = tokens_per_step(row) / tokens_per_step(base)
    paired = ratio_in_turn(base, row)
    if paired is not None:
        return Pace(
            paired.value * tokens, paired.low and paired.low * tokens, paired.high and paired.high * tokens
        )
    mine, other = rate(row), rate(base)
    assert row.step_time_ms is not None and base.step_time_ms is not None
    error = ratio_error(base.step_time_ms.samples, row.step_time_ms.samples)
    is_busy = row.busy is not None or base.busy is not None
    caveat = f"measured one after the other{' on a busy machine' if is_busy else ''}"
    if error is None:
        return Pace(mine / other, caveat=caveat)
    # Of the logarithm, in which a factor counts the same up and down.
    factor = math.exp(NOISE_SIGMAS * error * row.step_time_ms.median / base.step_time_ms.median)
    return Pace(mine / other, mine / other / factor, mine / other * factor, caveat)


def rate(row: Row) -> float:
    """Return the tokens a second of a measured row."""
    found = step_rate(row)
    assert found is not None
    return found


def times_text(paces: Sequence[Pace]) -> str:
    """Return such as "2.3 times" or "1.21 to 1.43 times", with one more digit below 2, where it is much of the gain."""
    ends = min(paces).value, max(paces).value
    form = ".2f" if ends[0] < 2 else ".1f"
    return f"{range_text(ends, form)} times"


def doubt_text(paces: Sequence[Pace]) -> str:
    """Return how sure a sentence is, such as " (95 % interval 1.12 to 1.31)"; empty where nothing is to be said."""
    caveat = max((each.caveat for each in paces), key=len)  # that of a busy machine, if there is one
    told = "; ".join(filter(None, [_noise_text(paces), caveat]))
    return f" ({told})" if told else ""


def _noise_text(paces: Sequence[Pace]) -> str:
    noisy = sum(each.is_noise for each in paces)
    if len(paces) > 1:
        return f"within noise in {noisy} of {len(paces)} pairs" if noisy else ""
    low, high = paces[0].low, paces[0].high
    if low is None or high is None:
        return ""
    ends = f"{low:.2f}", f"{high:.2f}"
    if ends[0] == ends[1]:
        return ""
    return f"95 % interval {ends[0]} to {ends[1]}{', within noise' if noisy else ''}"
