"""Medians, outliers and intervals of ratios."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobench.report import median_of_ratios, summarise
from zerobench.results import stats

times = st.floats(min_value=0.1, max_value=1e4)
some_times = st.lists(times, min_size=1, max_size=40)


@given(some_times)
def test_median_and_mad(samples: list[float]) -> None:
    assert stats.median(samples) == pytest.approx(statistics.median(samples), rel=1e-12)
    centre = statistics.median(samples)
    assert stats.mad(samples) == pytest.approx(
        statistics.median(abs(x - centre) for x in samples), rel=1e-9, abs=1e-9
    )


def test_median_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        stats.median([])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], []),
        ([50.0], []),
        ([1000.0, 0.0], []),
        ([9.99, 10.0, 10.2], []),  # two of three lie close together by chance
        ([9.99, 10.0, 10.0, 10.01, 14.0], []),
        ([9.9, 9.8, 10.0, 10.0, 10.2, 14.0], [5]),
        ([0.5, 0.30, 0.29, 0.31, 0.30, 0.31], [0]),
        ([10.0] * 6, []),
        ([10.0] * 7 + [100.0], [7]),  # MAD is zero
        ([100.0] + [10.0] * 7 + [1.0], [0, 8]),
        ([9.0, 9.0, 10.0, 10.0, 11.0, 11.0, 24.8], []),  # 14.8 MADs of one are 9.98 standard deviations
        ([9.0, 9.0, 10.0, 10.0, 11.0, 11.0, 24.9], [6]),
    ],
)
def test_outliers(samples: list[float], expected: list[int]) -> None:
    assert stats.outliers(samples) == expected


@given(st.lists(times, min_size=3, max_size=40), st.integers(-8, 8))
def test_outliers_do_not_depend_on_the_unit(samples: list[float], exponent: int) -> None:
    assert stats.outliers([x * 2.0**exponent for x in samples]) == stats.outliers(samples)


def test_summary_keeps_every_sample() -> None:
    summary = summarise([10.0, 10.1, 9.9, 10.0, 10.0, 50.0])
    assert summary.samples == [10.0, 10.1, 9.9, 10.0, 10.0, 50.0]
    assert (summary.median, summary.outliers) == (10.0, [5])
    assert summary.mean == pytest.approx(100.0 / 6)
    assert summary.std == pytest.approx(statistics.stdev(summary.samples))


@pytest.mark.parametrize("sample_num", [6, 16, 40])
def test_steady_times_are_seldom_said_to_change(sample_num: int) -> None:
    generator = random.Random(sample_num)
    windows = [[generator.gauss(100, 10) for _ in range(sample_num)] for _ in range(1000)]
    assert sum(stats.drift([window]) is not None for window in windows) < 20


@given(st.integers(8, 30), st.sampled_from([-0.3, -0.05, 0.05, 0.3]), st.integers(-3, 3))
def test_what_changes_from_step_to_step_is_told_in_shares(step_num: int, share: float, exponent: int) -> None:
    ramp = [10.0**exponent * (1 + share * (step / (step_num - 1) - 0.5)) for step in range(step_num)]
    assert stats.drift([ramp]) == pytest.approx(share)
    assert stats.drift([ramp, ramp, ramp]) == pytest.approx(share)  # repeats, each from the beginning


@pytest.mark.parametrize("step_num", [500, 501, 999, 2500])
def test_a_long_window_is_told_as_a_short_one(step_num: int) -> None:
    ramp = [1 + 0.3 * step / (step_num - 1) for step in range(step_num)]
    assert stats.drift([ramp]) == pytest.approx(0.3 / 1.15, rel=0.01)


def test_noise_does_not_hide_what_changes_in_a_long_window() -> None:
    generator = random.Random(4)
    steps = [generator.gauss(100 + step / 4000, 3) for step in range(20_000)]
    assert stats.drift([steps]) == pytest.approx(0.05, rel=0.05)
    assert stats.drift([[generator.gauss(100, 3) for _ in steps]]) is None


def test_what_differs_between_repeats_or_hardly_changes_is_steady() -> None:
    generator = random.Random(3)
    repeats = [[generator.gauss(level, 0.1) for _ in range(20)] for level in (10.0, 20.0, 30.0)]
    assert stats.drift(repeats) is None
    assert stats.drift([[100 + 0.1 * step for step in range(20)]]) is None  # 1.9 %
    assert stats.drift([[1.0, 2.0, 3.0, 4.0, 5.0]]) is None  # too few
    assert stats.drift([[7.0] * 20]) is None


def test_error_of_the_median_matches_its_spread() -> None:
    """The estimate from one window against the spread of medians over many windows."""
    generator = random.Random(1)
    windows = [[generator.gauss(100, 2) for _ in range(200)] for _ in range(400)]
    spread = statistics.stdev(stats.median(window) for window in windows)
    typical = statistics.median(stats.median_error(window) or 0.0 for window in windows)
    assert typical == pytest.approx(spread, rel=0.15)


def test_correlated_samples_count_less() -> None:
    generator = random.Random(2)
    value, walk = 0.0, []
    for _ in range(400):
        value = 0.8 * value + generator.gauss(0, 1)
        walk.append(100 + value)
    assert stats.effective_sample_num(walk) < 100  # n (1 - r) / (1 + r) is 44 at r = 0.8
    shuffled = generator.sample(walk, len(walk))
    assert stats.effective_sample_num(shuffled) > 300


def test_the_error_of_a_median_counts_independent_samples() -> None:
    slow_phase = [101.0, 101.0, 101.0, 99.0, 99.0, 99.0]  # r = 3/6
    assert stats.effective_sample_num(slow_phase) == pytest.approx(6 * (1 - 0.5) / (1 + 0.5))
    assert stats.median_error(slow_phase) == pytest.approx(math.sqrt(math.pi / 2) * 1.4826 / math.sqrt(2))
    in_turns = [101.0, 99.0] * 5
    assert stats.effective_sample_num(in_turns) == 10.0  # no more than there are
    mostly_equal = [10.0] * 5 + [12.0] * 2  # no MAD, and still not exact
    assert stats.median_error(mostly_equal) == pytest.approx(
        math.sqrt(math.pi / 2 / stats.effective_sample_num(mostly_equal)) * statistics.stdev(mostly_equal)
    )


def test_error_of_the_median_is_unknown_for_few_samples() -> None:
    for few in ([5.0], [5.0, 5.1], [4.9, 5.0, 5.0, 5.0, 5.1]):
        assert stats.median_error(few) is None
        assert stats.ratio_error(few, [4.0, 5.0] * 3) is stats.ratio_error([4.0, 5.0] * 3, few) is None
    assert stats.median_error([4.9, 5.0, 5.0, 5.0, 5.1, 5.1]) is not None


@pytest.mark.parametrize("sample_num", range(2, 13))
def test_equal_rows_are_seldom_told_apart(sample_num: int) -> None:
    """Nominally in 4.6 % of cases; where MAD of 3 to 5 samples were taken for their spread, in 22, 13 and 12 %."""
    generator = random.Random(sample_num)
    apart = 0
    for _ in range(1000):
        a, b = ([generator.gauss(100, 1) for _ in range(sample_num)] for _ in range(2))
        error = stats.ratio_error(a, b)
        apart += error is not None and abs(stats.median(a) / stats.median(b) - 1.0) > 2 * error
    assert apart < 110


@pytest.mark.parametrize(("pair_num", "rank"), [(6, 1), (15, 4), (20, 6), (50, 18)])
def test_median_of_ratios_uses_the_binomial_ranks(pair_num: int, rank: int) -> None:
    """Ranks as in tables of the sign test's interval."""
    ratio = median_of_ratios([float(i) for i in range(1, pair_num + 1)], [1.0] * pair_num)
    assert (ratio.low, ratio.high) == (rank, pair_num + 1 - rank)
    assert ratio.value == (pair_num + 1) / 2


def test_too_few_pairs_have_no_interval() -> None:
    """The whole range of 5 holds their median with 93.75 %."""
    assert median_of_ratios([2.0, 4.0, 6.0, 8.0, 10.0], [2.0] * 5) == (3.0, None, None)


def test_the_median_of_ratios_is_no_ratio_of_medians() -> None:
    for times in (1, 3):  # without an interval, and with one
        a, b = [1.0, 20.0, 300.0] * times, [1.0, 10.0, 1000.0] * times
        assert median_of_ratios(a, b).value == 1.0
        assert stats.median(a) / stats.median(b) == 2.0


def test_drift_common_to_both_sides_cancels() -> None:
    drift = [1.0 + 0.5 * (i % 7) for i in range(21)]
    ratio = median_of_ratios([3.0 * x for x in drift], [2.0 * x for x in drift])
    assert ratio == pytest.approx((1.5, 1.5, 1.5))


def test_intervals_hold_the_true_ratio() -> None:
    generator = random.Random(3)
    held = 0
    for _ in range(60):
        a = [generator.gauss(120, 6) for _ in range(25)]
        b = [generator.gauss(100, 5) for _ in range(25)]
        ratio = median_of_ratios(a, b)
        assert ratio.low is not None and ratio.high is not None
        held += ratio.low <= 1.2 <= ratio.high
    assert held >= 51  # 57 expected of 60


@given(st.lists(st.tuples(times, times), min_size=6, max_size=20), st.randoms(), st.integers(-6, 6))
@settings(max_examples=30, deadline=None)
def test_ratios_ignore_the_order_of_pairs_and_the_unit(
    pairs: list[tuple[float, float]], shuffler: random.Random, exponent: int
) -> None:
    shuffled = pairs.copy()
    shuffler.shuffle(shuffled)
    scale = 2.0**exponent
    expected = median_of_ratios([a for a, _ in pairs], [b for _, b in pairs])
    assert expected.low is not None and expected.high is not None
    assert expected.low <= expected.value <= expected.high
    assert median_of_ratios([a for a, _ in shuffled], [b for _, b in shuffled]) == expected
    assert median_of_ratios([a * scale for a, _ in pairs], [b * scale for _, b in pairs]) == expected


def test_ratios_reject_what_has_none() -> None:
    with pytest.raises(ValueError, match="positive"):
        median_of_ratios([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="as many samples"):
        median_of_ratios([1.0, 2.0], [1.0])
