"""Statistics over runs, and how often rows are measured with `--repeats auto`."""

from __future__ import annotations

from statistics import stdev

import pytest
import report_samples
from builders import make_window
from comparison_samples import Answering, ended_well, execution, plan, quiet_display

from zerobench.bench.assess import apply_turns, apply_windows
from zerobench.bench.output import OutputFolder
from zerobench.bench.plan.options import CompareOptions, check_options
from zerobench.bench.turn_runs import MOST_RUNS, Group, Member, TurnRuns, are_told_apart
from zerobench.errors import ConfigError
from zerobench.report import table_text
from zerobench.results.schema import Row, Turns
from zerobench.results.setting_values import precision, run_num


def bare_row(strategy: str = "zero1") -> Row:
    row = next(row for row in report_samples.sample().rows if row.strategy == strategy)
    row.step_time_ms = row.runs = row.over_runs = None
    return row


def in_turn(*runs_ms: list[float]) -> Turns:
    return Turns(how="in turn", group="workload 1", steps_per_window=10, windows_ms=list(runs_ms))


def test_one_run_has_no_spread() -> None:
    row = bare_row()
    apply_windows(row, [make_window(step_times_ms=[10.0, 30.0, 20.0])])
    assert row.runs is not None and [run.step_time_ms for run in row.runs] == [20.0]
    assert row.over_runs is None


def test_figures_of_runs_are_their_medians_and_spread() -> None:
    row = bare_row()
    for times in ([10.0, 12.0, 11.0], [20.0, 22.0, 21.0], [13.0, 13.0, 13.0]):
        apply_windows(row, [make_window(step_times_ms=times)])
    assert row.over_runs is not None
    assert row.over_runs["step_time_ms"].median == 13.0
    assert row.over_runs["step_time_ms"].std == pytest.approx(stdev([11.0, 21.0, 13.0]))
    assert row.over_runs["tokens_per_s"].median == pytest.approx(row.runs[2].tokens_per_s)
    assert "energy_per_step_j" not in row.over_runs  # which no run has


def test_runs_in_turn_replace_the_run_alone() -> None:
    row = bare_row()
    apply_windows(row, [make_window(step_times_ms=[50.0])])
    apply_turns(row, in_turn([10.0, 11.0, 12.0], [14.0, 13.0, 15.0]))
    assert [run.step_time_ms for run in row.runs] == [11.0, 14.0]
    assert set(row.over_runs) == {"step_time_ms", "tokens_per_s"}


def test_the_table_shows_the_spread_of_runs_where_every_row_has_one() -> None:
    results = report_samples.sample()
    assert "ms ± MAD" in table_text(results, width=200)
    for row in results.rows:
        if row.step_time_ms is not None:
            apply_turns(row, in_turn([100.0, 100.0], [104.0, 104.0]))
    text = table_text(results, width=200)
    assert "ms ± std of runs" in text and "102.0 ± 2.8" in text


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "often", ""])
def test_an_impossible_number_of_runs_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="whole number above zero, or auto"):
        run_num(text)


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5%", 0.005), ("0.02", 0.02)])
def test_a_precision_is_a_percentage_or_a_share(text: str, share: float) -> None:
    assert precision(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "100%", "%", "x", "nan"])
def test_an_impossible_precision_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 1% or 0\.01"):
        precision(text)


def test_auto_needs_rounds() -> None:
    with pytest.raises(ConfigError, match="rests on rows that take turns"):
        check_options(CompareOptions(repeats="auto", rounds=0), given_world_size=None)


def rows_of_ratio(spread: float) -> list[Row]:
    """Return two rows whose ratios within 15 rounds lie around 1.2, by so much."""
    rows = [bare_row("zero1"), bare_row("zero2")]
    ratios = [1.2 * (1 + spread * (index - 7) / 7) for index in range(15)]
    apply_turns(rows[0], in_turn([10.0] * 15))
    apply_turns(rows[1], in_turn([10.0 * ratio for ratio in ratios]))
    return rows


def test_rows_are_told_apart_when_the_interval_is_narrow() -> None:
    assert are_told_apart(rows_of_ratio(0.01), precision=0.01)
    assert not are_told_apart(rows_of_ratio(0.1), precision=0.01)
    assert are_told_apart(rows_of_ratio(0.1)[:1], precision=0.01)


class Counting(TurnRuns):
    """Takes given windows in place of processes."""

    spread = 0.1

    def run_all(self, group: Group) -> int:
        self.runs = 0
        self._measure_group(group)
        return self.runs

    def _run_in_turn(self, group: Group, run: int, tell) -> None:
        self.runs = run
        for member, row in zip(group.seated, rows_of_ratio(self.spread), strict=True):
            member.runs_ms.append(row.turns.windows_ms[0])


@pytest.mark.parametrize(("spread", "runs"), [(0.001, 1), (0.9, MOST_RUNS)])
def test_auto_stops_at_the_precision_or_the_most_runs(tmp_path, spread: float, runs: int) -> None:
    chosen = plan(strategies=("zero1", "zero2"), repeats="auto", rounds=15)
    with Answering(ended_well) as launcher:
        counted = Counting(
            execution(chosen, launcher),
            output=OutputFolder(tmp_path),
            display=quiet_display(),
            save=lambda: None,
        )
        counted.spread = spread
        members = [
            Member(step=None, row=bare_row(name), steps_per_window=10)  # type: ignore[arg-type]
            for name in ("zero1", "zero2")
        ]
        for member in members:
            member.row.step_time_ms = report_samples.sample().rows[0].step_time_ms
        assert counted.run_all(Group(name="workload 1", seated=members, in_passes=[])) == runs
