"""Several result files as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from report_samples import sample

from zerobench.cli.main import show
from zerobench.errors import DataError
from zerobench.report import finish_rows, table_text
from zerobench.results.files import read_results
from zerobench.results.merging import read_merged
from zerobench.results.rows import repeats_text
from zerobench.results.schema import Mfu, Results, Row

pytestmark = pytest.mark.slow  # draws


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes results that began at another time each, after a change."""
    made: list[Path] = []

    def write_results(change: Callable[[Results], object] = lambda _: None) -> Path:
        results = sample()
        results.created = f"2025-01-0{len(made) + 1}T12:00:00Z"
        change(results)
        finish_rows(results)
        folder = tmp_path / f"run{len(made) + 1}"
        folder.mkdir()
        (folder / "results.json").write_text(results.model_dump_json())
        made.append(folder)
        return folder

    return write_results


def row_of(results: Results, strategy: str) -> Row:
    return next(row for row in results.rows if row.strategy == strategy)


def slow(results: Results) -> None:
    """Twice the time, and a higher peak."""
    for row in results.rows:
        assert row.step_time_ms and row.peak_device_bytes
        row.step_time_ms.samples = [2 * time for time in row.step_time_ms.samples]
        row.peak_device_bytes += 1000


def test_one_path_is_as_its_file_is(write) -> None:  # type: ignore[no-untyped-def]
    folder = write()
    (merged,) = read_merged([folder])
    assert merged.results == read_results(folder) and merged.sources == [str(folder)]


def test_runs_of_equal_settings_become_repeats(write) -> None:  # type: ignore[no-untyped-def]
    (merged,) = read_merged([write(), write(slow)])
    before = row_of(sample(), "zero1")
    row = row_of(merged.results, "zero1")
    assert before.step_time_ms and row.step_time_ms and before.peak_device_bytes
    times = before.step_time_ms.samples
    assert row.step_time_ms.samples == [*times, *(2 * time for time in times)]
    assert row.settings.repeats == 2
    assert row.peak_device_bytes == before.peak_device_bytes + 1000
    assert row.tokens_per_s == pytest.approx(2 * 8 * 128 / (row.step_time_ms.median / 1e3))
    assert row.samples_per_s == pytest.approx(2 * 8 / (row.step_time_ms.median / 1e3))
    assert len(merged.results.rows) == len(sample().rows)
    assert "repeats 2 ·" in table_text(merged.results, width=400)


def test_columns_that_compare_rows_follow_the_pooled_times(write) -> None:  # type: ignore[no-untyped-def]
    def slow_zero2(results: Results) -> None:
        zero2 = row_of(results, "zero2")
        assert zero2.step_time_ms
        zero2.step_time_ms.samples = [9 * time for time in zero2.step_time_ms.samples]

    (merged,) = read_merged([write(), write(slow_zero2), write(slow_zero2)])
    assert (row_of(merged.results, "zero2").relative or 0) > 5
    assert row_of(merged.results, "zero1").relative == 1.0
    assert row_of(merged.results, "zero1").baseline == row_of(sample(), "zero1").baseline


def test_the_baseline_that_was_asked_for_stays(write) -> None:  # type: ignore[no-untyped-def]
    folders = [write(), write()]
    for folder in folders:
        results = Results.model_validate_json((folder / "results.json").read_text())
        finish_rows(results, "zero3")
        (folder / "results.json").write_text(results.model_dump_json())
    (merged,) = read_merged(folders)
    assert row_of(merged.results, "ddp").baseline == row_of(sample(), "zero3").name


def test_rates_that_follow_from_the_step_time_are_pooled_too(write) -> None:  # type: ignore[no-untyped-def]
    def with_mfu(results: Results) -> None:
        row_of(results, "zero1").mfu = Mfu(
            pct=40.0, tflops_per_gpu=400.0, peak_tflops=1000.0, peak_of="a GPU", flops_per_token=1.0
        )

    (merged,) = read_merged([write(with_mfu), write(with_mfu), write(slow)])
    row, before = row_of(merged.results, "zero1"), row_of(sample(), "zero1")
    assert row.mfu and row.step_time_ms and before.step_time_ms
    assert row.mfu.pct == pytest.approx(40.0 * before.step_time_ms.median / row.step_time_ms.median)


def test_rows_of_one_file_alone_are_kept(write) -> None:  # type: ignore[no-untyped-def]
    def larger_batch(results: Results) -> None:
        for row in results.rows:
            row.settings.batch_size = 16

    (merged,) = read_merged([write(), write(larger_batch)])
    assert len(merged.results.rows) == 2 * len(sample().rows)
    assert {row.settings.repeats for row in merged.results.rows} == {1}


def test_names_stay_unique_where_settings_differ_that_they_leave_out(write) -> None:  # type: ignore[no-untyped-def]
    def more_warmup(results: Results) -> None:
        for row in results.rows:
            row.settings.warmup_steps = 9

    (merged,) = read_merged([write(), write(more_warmup)])
    names = [row.name for row in merged.results.rows]
    assert len(set(names)) == len(names) == 2 * len(sample().rows)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("status", "expected"),
    [("failed", "failed"), ("oom", "oom"), ("wrong", "wrong"), ("skipped", "ok")],
)
def test_a_run_that_is_not_ok_decides_unless_it_was_skipped(write, status, expected, order) -> None:  # type: ignore[no-untyped-def]
    def without_zero1(results: Results) -> None:
        row = row_of(results, "zero1")
        row.status, row.error, row.step_time_ms, row.settings.communicator = status, "broken", None, None

    folders = [write(), write(without_zero1)]
    (merged,) = read_merged([folders[index] for index in order])
    row = row_of(merged.results, "zero1")
    assert row.status == expected
    assert len(merged.results.rows) == len(sample().rows)
    if expected == "ok":
        assert row.settings.repeats == 1 and row.step_time_ms is not None
    else:
        assert row.error == f"run {1 + order.index(1)} of 2: broken" and row.tokens_per_s_per_peak_gb is None


def test_rows_over_other_communicators_are_no_repeats(write) -> None:  # type: ignore[no-untyped-def]
    def other_communicator(results: Results) -> None:
        row_of(results, "zero1").settings.communicator = "c10d"

    (merged,) = read_merged([write(), write(other_communicator)])
    assert [row.strategy for row in merged.results.rows].count("zero1") == 2


@pytest.mark.parametrize("place", ["cpu", "torch", "host"])
def test_other_machines_and_versions_are_kept_apart_and_told(write, place: str) -> None:  # type: ignore[no-untyped-def]
    def elsewhere(results: Results) -> None:
        if place == "torch":
            results.versions["torch"] = "2.14.0"
        elif place == "cpu":
            results.machine["cpu"] = "Another CPU"
        else:
            results.machine["details"] = {"host": "b"}

    folders = [write(), write(elsewhere), write()]
    first, other = read_merged(folders)
    assert first.sources == [str(folders[0]), str(folders[2])] and other.sources == [str(folders[1])]
    assert row_of(first.results, "zero1").settings.repeats == 2
    assert row_of(other.results, "zero1").settings.repeats == 1
    (note,) = other.results.warnings
    told = {
        "torch": "versions.torch is 2.14.0 instead of 2.13.0",
        "cpu": "cpu is Another CPU instead of Synthetic CPU",
        "host": "details.host is b instead of nothing",
    }
    assert f"{folders[1]} cannot be merged with {folders[0]} and {folders[2]}" in note and told[place] in note


def test_the_load_of_a_machine_keeps_no_runs_apart(write) -> None:  # type: ignore[no-untyped-def]
    def loaded(load: float) -> Callable[[Results], None]:
        def change(results: Results) -> None:
            results.machine["details"] = {"load_average": [load], "memory_available_bytes": int(load * 1e9)}

        return change

    assert len(read_merged([write(loaded(0.1)), write(loaded(1.5))])) == 1


def test_the_same_comparison_does_not_count_twice(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = write()
    with pytest.raises(DataError, match="hold the same comparison: give one of them"):
        read_merged([folder, folder / "results.json"])


def test_one_incomplete_file_makes_the_whole_incomplete(write) -> None:  # type: ignore[no-untyped-def]
    def incomplete(results: Results) -> None:
        results.complete = False

    (merged,) = read_merged([write(), write(incomplete)])
    assert not merged.results.complete


def test_show_prints_a_table_for_each_machine_and_draws_where_asked(write, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    def elsewhere(results: Results) -> None:
        results.versions["torch"] = "2.14.0"

    folders = [write(), write(elsewhere)]
    show(folders)
    shown = capsys.readouterr().out
    assert "torch 2.13.0" in shown and "torch 2.14.0" in shown
    assert " ".join(shown.split()).count("cannot be merged with") == 1
    assert not list(tmp_path.rglob("*.png"))
    show(folders, plots=tmp_path / "plots")
    drawn = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("memory.png")}
    assert drawn == {"plots/1/memory.png", "plots/2/memory.png"}


def test_rows_that_took_turns_count_as_many_repeats_as_runs() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    (found,) = read_merged([folder / "cpu-grid-1", folder / "cpu-grid-2"])
    assert repeats_text(found.results.rows) == "2"
