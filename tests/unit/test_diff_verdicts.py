"""Verdicts of `zerobench diff`: against simulated machines, and at the edges of what can be told."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from diff_samples import MARGIN, ORDINARY, QUIET, Machine, difference, measured_results, turned
from report_samples import sample

from zerobench.diff.judge import BUSY, CANNOT_TELL, SAME, Judged, Measured, judge, runs_half_width
from zerobench.diff.metrics import metric_of
from zerobench.results.files import read_results
from zerobench.results.stats import median

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STEP_TIME = metric_of("step_time_ms.median")
PEAK = metric_of("peak_device_bytes")
QUIET_VERDICTS = (SAME, CANNOT_TELL)


def side(runs_ms: Sequence[Sequence[float]]) -> Measured:
    """Return the step time of a row that was measured in turn."""
    runs = [median(run) for run in runs_ms]
    return Measured(
        value=median(runs), runs=runs, times=[time for run in runs_ms for time in run], in_turn=True
    )


def simulated(draw: random.Random, machine: Machine, *, run_num: int, slower: float = 1.0) -> Judged:
    old, new = (side(machine.runs_ms(draw, 100.0 * factor, run_num=run_num)) for factor in (1.0, slower))
    return judge(old, new, STEP_TIME, margin=MARGIN)


def verdicts(old, new) -> list[str]:  # type: ignore[no-untyped-def]
    table = difference(old, new, columns=["step_time_ms.median"]).tables[0]
    return [each.judged.verdict for each in table.rows]


@pytest.mark.parametrize("run_num", [1, 3])
def test_two_runs_of_one_commit_change_at_most_3_of_20_rows(run_num: int) -> None:
    for seed in range(0, 6, 2):
        old, new = (measured_results(seed + more, run_num=run_num) for more in (0, 1))
        assert sum(verdict in QUIET_VERDICTS for verdict in verdicts(old, new)) >= 17


@pytest.mark.parametrize("run_num", [1, 2, 3, 5])
def test_few_unchanged_rows_are_called_changed(run_num: int) -> None:
    draw = random.Random(run_num)
    found = [simulated(draw, ORDINARY, run_num=run_num).verdict for _ in range(1000)]
    assert sum(verdict not in QUIET_VERDICTS for verdict in found) <= 50


@pytest.mark.parametrize("run_num", [1, 3])
def test_a_slowdown_of_5_percent_is_found_where_noise_is_below_1(run_num: int) -> None:
    draw = random.Random(run_num)
    found = [simulated(draw, QUIET, run_num=run_num, slower=1.05) for _ in range(500)]
    assert sum(judged.verdict == "slower" and judged.is_worse for judged in found) >= 485


def test_planted_rows_alone_are_called_slower() -> None:
    old = measured_results(1, machine=QUIET)
    new = measured_results(2, machine=QUIET, slower=lambda index: 1.05 if index in (3, 11) else 1.0)
    rows = difference(old, new).tables[0].rows
    assert {each.row.name.rpartition("_")[2] for each in rows if each.judged.verdict == "slower"} == {
        "3",
        "11",
    }


@pytest.mark.parametrize(("old_num", "new_num"), [(2, 2), (3, 1), (3, 3), (5, 5)])
def test_the_interval_of_runs_covers_the_truth(old_num: int, new_num: int) -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(2000):
        old, new = ([math.exp(draw.gauss(0, 0.02)) for _ in range(num)] for num in (old_num, new_num))
        covered += abs(math.log(median(new) / median(old))) <= runs_half_width(old, new)
    assert covered >= 0.935 * 2000


def test_one_run_each_is_never_called_the_same() -> None:
    windows = [[100.0 + 0.1 * (index % 3) for index in range(15)]]
    judged = judge(side(windows), side(windows), STEP_TIME, margin=MARGIN)
    assert judged.verdict == CANNOT_TELL and judged.ratio == 1.0
    assert judged.low == pytest.approx(1 / 1.03, abs=1e-3)


def test_runs_that_agree_are_the_same() -> None:
    runs = [[100.0] * 15, [100.2] * 15]
    assert judge(side(runs), side(runs), STEP_TIME, margin=MARGIN).verdict == SAME


def test_runs_too_wide_to_exclude_a_regression_cannot_tell() -> None:
    runs = [[100.0] * 15, [110.0] * 15]
    assert judge(side(runs), side(runs), STEP_TIME, margin=MARGIN).verdict == CANNOT_TELL


def test_a_row_that_was_measured_alone_tells_large_changes_only() -> None:
    old, new, far = (Measured(value=ms, times=[ms] * 9 + [ms + 0.1]) for ms in (100.0, 120.0, 140.0))
    assert judge(old, new, STEP_TIME, margin=MARGIN).verdict == CANNOT_TELL
    assert judge(old, far, STEP_TIME, margin=MARGIN).verdict == "slower"


@pytest.mark.parametrize("workload", ["h200-gpt2", "h200-llama"])
def test_two_runs_of_one_commit_on_a_gpu_change_no_row(workload: str) -> None:
    old, new = (read_results(RESULTS / f"{workload}-{number}") for number in (1, 2))
    assert set(verdicts(old, new)) == {CANNOT_TELL}


def test_windows_that_spread_widely_widen_the_interval() -> None:
    wide = [[100.0 + 4.0 * (index % 3 - 1) for index in range(40)]]
    slower = [[1.08 * ms for ms in wide[0]]]
    judged = judge(side(wide), side(slower), STEP_TIME, margin=MARGIN)
    assert judged.verdict == CANNOT_TELL and judged.high > 1.08 * 1.11


def test_few_windows_tell_nothing() -> None:
    old, new = (side([[ms] * 5]) for ms in (100.0, 200.0))
    judged = judge(old, new, STEP_TIME, margin=MARGIN)
    assert (judged.verdict, judged.ratio, judged.low) == (CANNOT_TELL, 2.0, None)


def test_a_busy_machine_tells_nothing_of_times() -> None:
    old, new = measured_results(1), measured_results(2, slower=lambda _: 2.0)
    new.rows[0].busy = "other processes used 40 % of the cores"
    tables = difference(old, new).tables
    found = {each.row.name: each.judged for each in tables[0].rows}[new.rows[0].name]
    assert (found.verdict, found.rests_on) == (CANNOT_TELL, BUSY)
    assert all(each.judged.verdict == SAME for each in tables[1].rows)  # memory


@pytest.mark.parametrize(
    ("column", "more", "less"),
    [
        ("step_time_ms.median", "slower", "faster"),
        ("tokens_per_s", "faster", "slower"),
        ("peak_device_bytes", "worse", "better"),
        ("energy_per_step_j", "worse", "better"),
        ("transfers.achieved_gb_s.to_host", "better", "worse"),
        ("sampled.power_w", "higher", "lower"),
        ("settings.batch_size", "higher", "lower"),
        ("a_column_of_later", "higher", "lower"),
    ],
)
def test_each_column_has_its_direction(column: str, more: str, less: str) -> None:
    metric = metric_of(column)
    assert (metric.word(is_more=True), metric.word(is_more=False)) == (more, less)


def test_fewer_tokens_are_slower_by_the_runs() -> None:
    old, new = sample(), sample()
    for results, step_ms in ((old, 100.0), (new, 110.0)):
        for row in results.rows:
            turned(row, [[step_ms] * 15, [step_ms + 0.1] * 15])
    found = difference(old, new, columns=["tokens_per_s"]).tables[0]
    assert len(found.regressions()) == 7 and found.rows[0].judged.rests_on == "2 and 2 runs"
    assert found.rows[0].judged.ratio == pytest.approx(100 / 110, rel=1e-3)


def test_a_column_without_a_direction_is_no_regression() -> None:
    metric = metric_of("device_busy_pct")
    old, new = (Measured(value=pct, runs=[pct, pct]) for pct in (50.0, 90.0))
    judged = judge(old, new, metric, margin=MARGIN)
    assert judged.verdict == "higher" and not judged.is_worse and not judged.is_better


def test_one_value_in_each_file_cannot_tell() -> None:
    old, new = (Measured(value=value) for value in (1.0, 3.0))
    assert judge(old, new, metric_of("validation_loss"), margin=MARGIN).verdict == CANNOT_TELL


@pytest.mark.parametrize("value", [None, 0.0, -1.0])
def test_what_has_no_ratio_cannot_tell(value: float | None) -> None:
    judged = judge(Measured(value=1.0), Measured(value=value), PEAK, margin=MARGIN)
    assert (judged.verdict, judged.ratio) == (CANNOT_TELL, None)


@pytest.mark.parametrize("times", [[1e308] * 20, [5e-324] * 20, [1e-300, 1e300] * 10])
def test_times_that_no_machine_takes_cannot_tell(times: list[float]) -> None:
    old, new = Measured(value=1e-300, times=times), Measured(value=1e300, times=times)
    assert judge(old, new, STEP_TIME, margin=MARGIN).verdict == CANNOT_TELL
    old, new = Measured(value=1e-300, runs=times), Measured(value=1e300, runs=times)
    assert judge(old, new, STEP_TIME, margin=MARGIN).ratio is None
