"""Robust statistics of samples: median, MAD, outliers, drift, errors of medians, a ratio with its interval.

Plain Python: the micro-benchmarks and the comparison both use it. Formulas and sources:
docs/reference/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean, stdev
from typing import NamedTuple

from zerobench.results.schema import StepTime

MAD_TO_SIGMA = 1.4826  # the standard deviation of a normal distribution over its MAD
MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, normal samples

OUTLIER_SIGMAS = 10.0
"""A sample further from the median than this many robust standard deviations is an outlier (the threshold of
hyperfine, src/outlier_detection.rs; modified z-score of Iglewicz and Hoaglin, How to Detect and Handle Outliers,
ASQC 1993)."""

FEWEST_SAMPLES = 6
"""With fewer nothing is said of noise: by chance alone they may lie close together, and no two of them bound the median
with 95 % (the whole range of 5 holds it in 93.75 % of cases)."""


STEADY_SHARE = 0.03
"""Times that change by less than this share of their median over the measured steps are steady enough."""

DRIFT_SIGMAS = 2.576
"""Of Kendall's S: chance alone goes beyond in 1 % of cases."""

MOST_DRIFT_POINTS = 500
"""Of a window, since all pairs are looked at: the steps of a longer one are taken together by their medians."""


class Ratio(NamedTuple):
    """A ratio with its 95 % interval; None where there are too few samples for one."""

    value: float
    low: float | None
    high: float | None


def median(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("the median of no samples is undefined: give at least one sample")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] + (ordered[middle] - ordered[middle - 1]) / 2


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median, unscaled."""
    centre = median(values)
    return median([abs(value - centre) for value in values])


def modified_z_scores(values: Sequence[float]) -> list[float]:
    """(x - median) / (1.4826 MAD). Where more than half of the samples are equal, MAD is zero: every other sample then
    scores infinity."""
    centre = median(values)
    sigma = MAD_TO_SIGMA * mad(values)
    if sigma > 0:
        return [(value - centre) / sigma for value in values]
    return [0.0 if value == centre else math.copysign(math.inf, value - centre) for value in values]


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of samples far from the median, unless there are too few to tell. They are flagged, never dropped."""
    if len(values) < FEWEST_SAMPLES:
        return []
    return [index for index, score in enumerate(modified_z_scores(values)) if abs(score) > OUTLIER_SIGMAS]


def drift(windows: Sequence[Sequence[float]]) -> float | None:
    """Return the share of the median by which times rose (or fell, then negative) from the first to the last step of a
    window; None if they are steady, by size or because chance alone could explain the change.

    The slope is that of Theil and Sen, the test that of Mann and Kendall, both over pairs within a window (Hirsch,
    Slack and Smith, Techniques of Trend Analysis for Monthly Water Quality Data, 1982).
    """
    rises = above = 0
    variance = 0.0
    slopes = []
    for window in windows:
        if len(window) < FEWEST_SAMPLES:
            continue
        together = math.ceil(len(window) / MOST_DRIFT_POINTS)
        whole = len(window) // together * together
        points = [median(window[first : first + together]) for first in range(0, whole, together)]
        for first, second in combinations(range(len(points)), 2):
            change = points[second] - points[first]
            rises += (change > 0) - (change < 0)
            slopes.append(change / ((second - first) * together))
        variance += len(points) * (len(points) - 1) * (2 * len(points) + 5) / 18
        above = max(above, len(window) - 1)
    centre = median([time for window in windows for time in window])
    if not slopes or centre <= 0:
        return None
    score = (abs(rises) - 1) / math.sqrt(variance)
    share = median(slopes) * above / centre
    return share if score > DRIFT_SIGMAS and abs(share) >= STEADY_SHARE else None


def ends(windows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Medians of the first and of the last quarter of all windows."""
    quarters = [max(1, len(window) // 4) for window in windows]
    return (
        median([time for window, num in zip(windows, quarters, strict=True) for time in window[:num]]),
        median([time for window, num in zip(windows, quarters, strict=True) for time in window[-num:]]),
    )


def summarise(samples: Sequence[float]) -> StepTime:
    """Return a row's step times as the result file holds them."""
    return StepTime(
        median=median(samples),
        mad=mad(samples),
        mean=fmean(samples),
        std=stdev(samples) if len(samples) > 1 else 0.0,
        samples=list(samples),
        outliers=outliers(samples),
    )


def effective_sample_num(samples: Sequence[float]) -> float:
    """Samples counted as independent ones: n (1 - r) / (1 + r), r the lag-1 autocorrelation where it is positive.

    Consecutive step times are correlated (a slow phase of the machine slows several), so n alone would make the error
    of the median too small."""
    sample_num = len(samples)
    if sample_num < 3:
        return float(sample_num)
    centre = fmean(samples)
    deviations = [value - centre for value in samples]
    variance = math.fsum(value * value for value in deviations)
    if variance <= 0:
        return float(sample_num)
    lagged = math.fsum(a * b for a, b in pairwise(deviations))
    correlation = min(max(lagged / variance, 0.0), 1 - 1 / sample_num)
    return max(1.0, sample_num * (1 - correlation) / (1 + correlation))


def median_error(samples: Sequence[float]) -> float | None:
    """Standard error of the median, from the MAD; None where there are too few samples to tell."""
    if len(samples) < FEWEST_SAMPLES:
        return None
    sigma = MAD_TO_SIGMA * mad(samples) or stdev(samples)
    return MEDIAN_EFFICIENCY * sigma / math.sqrt(effective_sample_num(samples))


def ratio_error(numerator: Sequence[float], denominator: Sequence[float]) -> float | None:
    """Standard error of median(numerator) / median(denominator), propagated to first order; None if unknown."""
    above, below = median_error(numerator), median_error(denominator)
    top, bottom = median(numerator), median(denominator)
    if above is None or below is None or top <= 0 or bottom <= 0:
        return None
    return top / bottom * math.hypot(above / top, below / bottom)


def median_of_ratios(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The median of a[i] / b[i] over interleaved pairs, with the distribution-free 95 % interval of a median.

    Drift that hits both sides of a pair alike cancels. The interval is the pair of order statistics that the binomial
    distribution gives; with fewer than 6 pairs no such pair exists, and there is no interval."""
    if not a or not b:
        raise ValueError("a ratio needs at least one sample on each side")
    if min(a) <= 0 or min(b) <= 0:
        raise ValueError("a ratio of times or rates needs positive samples")
    if len(a) != len(b):
        raise ValueError(f"pairs need as many samples on each side, got {len(a)} and {len(b)}")
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    pair_num = len(ratios)
    below, tail = 0, 0.0
    while below < (pair_num - 1) // 2:
        tail += math.comb(pair_num, below) / 2**pair_num
        if tail > 0.025:
            break
        below += 1
    if not below:
        return Ratio(median(ratios), None, None)
    return Ratio(median(ratios), ratios[below - 1], ratios[pair_num - below])
