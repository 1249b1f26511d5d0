"""Ratios of rows that took turns, and what tables and advice say of them."""

from __future__ import annotations

import pytest
from report_samples import gpus, sample

from zerobench.bench.assess import apply_turns
from zerobench.report import advise, finish_rows, table_text
from zerobench.results.rows import exceeds_noise, ratio_in_turn, repeats_text, ties_with_fastest
from zerobench.results.schema import Results, Row, Turns

DRIFT = [
    1.0,
    1.6,
    0.7,
    1.2,
    0.9,
    1.5,
    0.8,
    1.1,
    1.3,
    0.6,
    1.4,
    1.0,
    0.9,
    1.2,
    0.7,
]  # of the machine, by round
NOISE = [
    0.01,
    -0.02,
    0.0,
    0.02,
    -0.01,
    0.0,
    0.01,
    -0.01,
    0.02,
    0.0,
    -0.02,
    0.01,
    0.0,
    -0.01,
    0.0,
]  # of one row


def turned(row: Row, step_ms: float, *, noisy: bool = True, how: str = "in turn", group: str = "g") -> Row:
    """Give ``row`` windows on a machine that drifts."""
    noise = NOISE if noisy else [0.0] * len(DRIFT)
    windows = [step_ms * drift * (1 + own) for drift, own in zip(DRIFT, noise, strict=True)]
    apply_turns(row, Turns(how=how, group=group, steps_per_window=10, windows_ms=[windows]))  # type: ignore[arg-type]
    return row


def passed(row: Row, *times_ms: float) -> Row:
    windows = [[time] for time in times_ms]
    apply_turns(row, Turns(how="passes", group="g", steps_per_window=10, windows_ms=windows))
    return row


def two(**second) -> tuple[Results, Row, Row]:
    """Two rows of one workload that took turns: 10 ms a step, and 5 % slower."""
    results = sample()
    fast, slow = results.rows[3], results.rows[4]
    results.rows = [turned(fast, 10.0, noisy=False), turned(slow, 10.5, **second)]
    finish_rows(results)
    return results, fast, slow


def test_a_ratio_within_rounds_does_not_know_of_the_drift() -> None:
    _, fast, slow = two()
    found = ratio_in_turn(slow, fast)
    assert found is not None and found.low is not None and found.high is not None
    assert found.value == pytest.approx(1.05, rel=1e-9)
    assert 1.05 * 0.98 < found.low < 1.05 < found.high < 1.05 * 1.02


@pytest.mark.parametrize("other", [{"group": "other"}, {"how": "passes"}])
def test_rows_that_took_no_turns_with_each_other_have_no_ratio_within_rounds(other) -> None:
    _, fast, slow = two(**other)
    assert ratio_in_turn(slow, fast) is None
    assert slow.relative_low is None and slow.relative is not None


def test_runs_are_paired_round_by_round() -> None:
    _, fast, slow = two()
    for row, step_ms in ((fast, 10.0), (slow, 20.0)):
        assert row.turns is not None
        runs = [[step_ms, 3 * step_ms], [2 * step_ms, 5 * step_ms], [step_ms, step_ms]]
        apply_turns(row, row.turns.model_copy(update={"windows_ms": runs}))
    found = ratio_in_turn(slow, fast)
    assert found == (2.0, 2.0, 2.0)
    assert fast.step_time_ms is not None
    assert fast.step_time_ms.samples == [10.0, 30.0, 20.0, 50.0, 10.0, 10.0]


def test_relative_has_the_interval_of_the_ratio() -> None:
    _, fast, slow = two()
    assert (fast.relative, fast.relative_low, fast.relative_high) == (1.0, None, None)
    assert slow.relative == pytest.approx(1.05)
    assert slow.relative_low is not None and slow.relative_high is not None
    assert slow.relative_uncertainty == pytest.approx((slow.relative_high - slow.relative_low) / 4)


def test_relative_is_per_token_where_steps_are_of_different_sizes() -> None:
    results, fast, slow = two()
    slow.settings.batch_size = 2 * fast.settings.batch_size
    finish_rows(results)
    assert slow.relative == 1.0 and fast.relative == pytest.approx(2 / 1.05)
    assert fast.relative_low is not None and fast.relative_low < 2 / 1.05


def test_a_small_difference_that_every_round_shows_is_no_tie_though_the_machine_drifts() -> None:
    results, fast, slow = two()
    assert not ties_with_fastest(slow)
    assert exceeds_noise(1.05, slow, fast) and exceeds_noise(1 / 1.05, fast, slow)
    assert advise(results)[0].startswith(f"{fast.strategy} is the fastest of 2 correct rows")


def test_the_fastest_row_is_the_one_that_is_faster_within_rounds() -> None:
    """The machine is three times slower in the last seven rounds, and one row meets two slow moments more."""
    results = sample()
    results.rows = [row for row in results.rows if row.strategy in ("zero1", "zero2")]
    slow, fast = results.rows
    for row, windows in (
        (slow, [10.0] * 8 + [30.0] * 7),
        (fast, [9.7] * 6 + [30.0] * 2 + [29.1] * 7),
    ):
        apply_turns(row, Turns(how="in turn", group="g", steps_per_window=10, windows_ms=[windows]))
    assert slow.step_time_ms.median < fast.step_time_ms.median
    finish_rows(results)
    assert fast.relative == 1.0
    assert slow.relative == pytest.approx(1 / 0.97)


def test_rows_whose_interval_contains_one_tie() -> None:
    results, fast, slow = two()
    turned(slow, 10.0)
    finish_rows(results)
    assert slow.relative_low is not None and slow.relative_high is not None
    assert slow.relative_low <= 1 <= slow.relative_high and ties_with_fastest(slow)
    assert not exceeds_noise(1.001, slow, fast)
    assert "tie as the fastest of 2 correct rows" in advise(results)[0]


def test_the_share_of_the_floor_and_the_speedup_are_medians_within_rounds() -> None:
    results = gpus()
    floor, rows = results.rows[0], [row for row in results.rows[1:-1] if row.settings.world_size == 2]
    turned(floor, 8.0, noisy=False)
    for row in rows:
        turned(row, 10.0)
    ddp = next(row for row in rows if row.strategy == "ddp")
    windows = [11.0 * drift for drift in DRIFT[1:] + DRIFT[:1]]  # another part of the drift in each round
    apply_turns(ddp, Turns(how="in turn", group="g", steps_per_window=10, windows_ms=[windows]))
    finish_rows(results)
    other = next(row for row in rows if row.strategy == "zero1")
    assert other.of_compute_only == pytest.approx(0.8, rel=0.03)
    paired = ratio_in_turn(ddp, other)
    assert paired is not None and other.speedup == paired.value
    assert ddp.step_time_ms is not None and other.step_time_ms is not None
    assert other.speedup != ddp.step_time_ms.median / other.step_time_ms.median


def test_few_rounds_have_no_interval_and_rank_nothing() -> None:
    results, fast, slow = two()
    for row in (fast, slow):
        assert row.turns is not None
        windows = [run[:3] for run in row.turns.windows_ms]
        apply_turns(row, row.turns.model_copy(update={"windows_ms": windows}))
    finish_rows(results)
    assert slow.relative_low is slow.relative_uncertainty is None
    assert advise(results)[0].endswith(
        "3 windows tell too little about the noise to call it the fastest. Measure 6 or more (--rounds)."
    )


def test_rows_in_passes_have_an_interval_of_six_medians_and_none_of_fewer() -> None:
    results, fast, slow = two()
    passed(fast, 10.0, 10.1, 9.9)
    passed(slow, 11.0, 11.1, 10.9)
    finish_rows(results)
    assert slow.relative == 1.1 and slow.relative_uncertainty is None
    assert "(--repeats)" in advise(results)[0]
    passed(fast, 10.0, 10.1, 9.9, 10.0, 10.2, 9.8)
    passed(slow, 11.0, 11.1, 10.9, 11.0, 11.2, 10.8)
    finish_rows(results)
    assert slow.relative_uncertainty is not None and slow.relative_low is None


def test_a_row_in_a_few_passes_does_not_keep_the_others_from_being_ranked() -> None:
    results, fast, _ = two()
    third = sample().rows[5]
    results.rows.append(passed(third, 30.0, 31.0, 29.0))
    finish_rows(results)
    first, second, *_ = advise(results)
    assert first.startswith(f"{fast.strategy} is the fastest of 2 correct rows")
    assert second.startswith(f"{third.strategy} was measured in passes, too few to rank.")


def test_the_table_says_how_rows_were_measured() -> None:
    results, fast, slow = two()
    text = " ".join(table_text(results, width=200).split())
    assert "Measured in turn: all rows; 15 rounds x 10 steps, 1 run." in text
    assert slow.turns is not None
    slow.turns.steps_per_window = 40
    results.rows.append(passed(sample().rows[5], 30.0, 31.0, 29.0))
    text = " ".join(table_text(results, width=200).split())
    assert (
        f"Measured in turn: {fast.strategy} and {slow.strategy}; 15 rounds x 10 to 40 steps, 1 run." in text
    )
    assert (
        f"Measured in passes, fresh runs of one window each: {results.rows[2].strategy}; 3 runs x 10 steps."
    ) in text


def test_the_settings_count_the_runs_of_turns() -> None:
    results, fast, slow = two()
    for row in (fast, slow):
        row.settings.repeats = 2
    assert repeats_text(results.rows) == "1 of 2"
    assert fast.turns is not None
    for row in (fast, slow):
        passed(row, 1.0, 1.0, 1.0)
    assert repeats_text(results.rows) == "2"


def test_advice_counts_windows() -> None:
    results, _, _ = two()
    assert "; 15 windows a row, MAD " in advise(results)[-1]


def test_a_machine_that_drifts_over_rounds_is_no_drift_of_rows() -> None:
    results, fast, slow = two()
    for row in (fast, slow):
        assert row.turns is not None
        windows = [[10.0 * 1.05**number for number in range(15)]]
        apply_turns(row, row.turns.model_copy(update={"windows_ms": windows}))
    assert "still changed" not in table_text(results)
