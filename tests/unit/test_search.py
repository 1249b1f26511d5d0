"""`compare --find` without processes: the rows that a search leaves, what is kept of it, and what is said of it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_samples import HOST, Answering, ended_well, execution, plan, quiet_display
from rich.console import Console

from zerobench.bench import session as sessions
from zerobench.bench.assess import first_row
from zerobench.bench.closing import closing
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.output import MEASURED, OutputFolder
from zerobench.bench.resume import earlier_rows
from zerobench.bench.schedule import schedule
from zerobench.bench.session import Session
from zerobench.errors import ConfigError
from zerobench.report import advise, load
from zerobench.results.files import read_results

GIB = 1 << 30
FIND = {"find": "batch", "device_memory_gib": 4.0, "strategies": ("zero0", "zero3"), "batch_size": (4,)}
LARGEST = {"zero0": 5, "zero3": 11}


class Killed(BaseException):
    """In place of a signal that ends the command at once."""


def answer(job) -> Outcome:
    """Fit batches up to those of LARGEST."""
    if job.kind == "row" and job.settings.batch_size > LARGEST[job.strategy]:
        return Outcome(status="oom", error="too much", oom_tier="device")
    return ended_well(job, step_times_ms=[10.0, 10.0])


def run(
    folder: Path, answer: Callable, *, resumed: bool = False, host=HOST, ends: bool = False, **options: Any
):
    """Run a comparison that searches; return its rows by strategy and its jobs. ``ends``: write its summary, too."""
    chosen = plan(**{**FIND, **options})
    session = Session(chosen, host=host, output=OutputFolder(folder, resumed=resumed))
    with Answering(answer) as launcher:
        if resumed:
            session.go_on_from(*earlier_rows(folder, chosen, host=host, data_digest=None))
        try:
            session.run(schedule(chosen), execution(chosen, launcher, host=host), quiet_display())
            if ends:
                quiet = Console(file=io.StringIO())
                session.end(interrupted=False, console=quiet, notes=quiet)
        except Killed:
            pass
    return {row.strategy: row for row in session.results.rows}, launcher.jobs


def batches(jobs, strategy: str, *, verified: bool = False) -> list[int]:
    """Return the batches that rows were tried at, or verified at."""
    return [
        job.settings.batch_size
        for job in jobs
        if job.kind == "row" and job.strategy == strategy and job.verify == verified
    ]


def test_every_row_is_measured_at_its_own_largest_value(tmp_path) -> None:
    rows, jobs = run(tmp_path, answer)
    for strategy, largest in LARGEST.items():
        row = rows[strategy]
        assert (row.status, row.settings.batch_size) == ("ok", largest)
        assert (row.search.largest, row.search.too_large) == (largest, largest + 1)
        assert row.search.try_num == len(row.search.tries) == len(batches(jobs, strategy))
        assert batches(jobs, strategy, verified=True) == [largest]
        assert f"--batch-size {largest} " in row.rerun and "--find" not in row.rerun
    assert batches(jobs, "zero3") == [4, 8, 16, 12, 10, 11]


def test_tries_train_few_steps(tmp_path) -> None:
    _, jobs = run(tmp_path, answer)
    tries = [job for job in jobs if job.kind == "row" and not job.verify]
    assert {
        (job.settings.warmup_steps, job.settings.num_steps, job.profile_steps, job.validation_batches)
        for job in tries
    } == {(1, 2, 0, 0)}


def test_each_row_is_verified_against_a_reference_of_its_own_batch(tmp_path) -> None:
    _, jobs = run(tmp_path, answer)
    assert [job.settings.batch_size for job in jobs if job.kind == "reference"] == [5, 11]


def test_rows_that_find_the_same_value_are_verified_alike(tmp_path) -> None:
    rows, jobs = run(tmp_path, answer, strategies=("zero3",), offload=("none", "cpu_optimizer"))
    assert [job.settings.batch_size for job in jobs if job.kind == "reference"] == [11, 11]
    assert rows["zero3"].status == "ok"


def test_a_row_above_the_memory_limit_does_not_fit(tmp_path) -> None:
    rows, _ = run(tmp_path, of_size, device_memory_gib=None, memory_limit_gib=6.5)
    assert rows["zero0"].settings.batch_size == 6
    assert [(one.value, one.status, one.fits) for one in rows["zero0"].search.tries][:2] == [
        (4, "ok", True),
        (8, "ok", False),
    ]
    assert rows["zero0"].verdict == "optimal"


def of_size(job) -> Outcome:
    """Answer with a peak of a GiB for each sequence."""
    outcome = ended_well(job)
    for report in outcome.reports.values():
        if report.window is not None:
            report.window.memory.peak_bytes = job.settings.batch_size * GIB
    return outcome


def test_the_memory_limit_is_that_of_verdicts_too(tmp_path) -> None:
    run(tmp_path, of_size, find=None, batch_size=(4, 8), strategies=("zero0",), memory_limit_gib=6.0)
    found = {row.settings.batch_size: row.verdict for row in read_results(tmp_path).rows}
    assert found[8] == "does not fit" != found[4]


def test_a_row_that_fits_at_no_value_is_out_of_memory(tmp_path) -> None:
    rows, jobs = run(tmp_path, lambda job: Outcome(status="oom", error="too much"), strategies=("zero0",))
    row = rows["zero0"]
    assert (row.status, row.error, row.settings.batch_size, row.search.largest) == (
        "oom",
        "too much",
        1,
        None,
    )
    assert batches(jobs, "zero0") == [4, 2, 1] and not batches(jobs, "zero0", verified=True)
    (sentence,) = closing([], [row], options=plan(**FIND).options, host=HOST)
    assert sentence.startswith("No batch was found that fits, down to batch 1")


def test_a_row_that_cannot_run_has_the_status_of_its_first_try(tmp_path) -> None:
    rows, jobs = run(tmp_path, lambda job: Outcome(status="failed", error="broken"), strategies=("zero0",))
    assert (rows["zero0"].status, rows["zero0"].error) == ("failed", "broken")
    assert len(jobs) == 1


def test_a_row_that_needs_more_than_its_tries_is_searched_by_whole_rows(tmp_path) -> None:
    def answer(job) -> Outcome:
        limit = 6 if job.verify else 11
        if job.kind == "row" and job.settings.batch_size > limit:
            return Outcome(status="oom", error="too much")
        return ended_well(job)

    rows, jobs = run(tmp_path, answer, strategies=("zero3",))
    row = rows["zero3"]
    assert (row.status, row.settings.batch_size, row.search.too_large) == ("ok", 6, 7)
    assert batches(jobs, "zero3", verified=True) == [11, 5, 8, 6, 7]
    assert sum(one.whole for one in row.search.tries) == 5


def test_what_cannot_fit_by_the_estimate_is_not_started(tmp_path) -> None:
    host = replace(HOST, why_not_lockable=lambda row: "no room" if row.settings.batch_size > 6 else None)
    rows, jobs = run(tmp_path, answer, strategies=("zero3",), host=host)
    assert rows["zero3"].settings.batch_size == 6
    assert batches(jobs, "zero3") == [4, 6]


@pytest.mark.parametrize("at", [(4, False), (10, False), (11, True)])
def test_a_killed_search_goes_on_with_the_tries_it_has(tmp_path, at) -> None:
    def killing(job) -> Outcome:
        if job.strategy == "zero3" and (job.settings.batch_size, job.verify) == at:
            raise Killed
        return answer(job)

    _, before = run(tmp_path, killing)
    rows, after = run(tmp_path, answer, resumed=True)
    assert rows["zero0"].settings.batch_size == 5 and not batches(after, "zero0")
    row = rows["zero3"]
    assert (row.settings.batch_size, row.search.largest) == (11, 11)
    tried = batches(before, "zero3")
    assert (tried if at[1] else tried[:-1]) + batches(after, "zero3") == [4, 8, 16, 12, 10, 11]
    assert read_results(tmp_path / MEASURED).searching is None


def test_a_search_under_another_limit_is_not_gone_on_with(tmp_path) -> None:
    def killing(job) -> Outcome:
        if job.settings.batch_size == 10:
            raise Killed
        return answer(job)

    run(tmp_path, killing)
    with pytest.raises(ConfigError, match="device GiB 4, and now it would have 3"):
        run(tmp_path, answer, resumed=True, device_memory_gib=3.0)


def test_rows_of_finished_searches_take_turns_and_repeat_at_their_values(tmp_path) -> None:
    rows, jobs = run(tmp_path, answer, repeats=2)
    assert [job.settings.batch_size for job in jobs[-2:]] == [5, 11]
    assert {len(row.step_time_ms.samples) for row in rows.values()} == {4}


def test_no_try_begins_after_the_given_minutes(tmp_path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])

    def slow(job) -> Outcome:
        now[0] += 60.0
        return answer(job)

    rows, jobs = run(tmp_path, slow, max_minutes=7.5)
    assert list(rows) == ["zero0"] and not read_results(tmp_path).complete
    kept = read_results(tmp_path / MEASURED).searching
    assert kept.strategy == "zero3" and [one.value for one in kept.search.tries] == batches(jobs, "zero3")
    rows, after = run(tmp_path, answer, resumed=True)
    assert rows["zero3"].settings.batch_size == 11
    assert batches(jobs, "zero3") + batches(after, "zero3") == [4, 8, 16, 12, 10, 11]


@pytest.mark.slow  # draws
def test_files_and_the_summary_show_what_was_found(tmp_path) -> None:
    rows, _ = run(tmp_path, answer, ends=True)
    *lines, last = (tmp_path / "summary.txt").read_text().splitlines()
    assert last == f"The largest batch that fits is 11, with zero3. It runs by: {rows['zero3'].rerun}"
    assert advise(read_results(tmp_path))[-1] == last
    (head,) = [line for line in lines if line.startswith("strategy")]
    (found,) = [line for line in lines if line.startswith("zero3 ")]
    assert head.split()[1] == "largest" and found.split()[1] == "11"
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["search.setting"], line["search.largest"], line["search.too_large"]) for line in lines] == [
        ("batch", "5", "6"),
        ("batch", "11", "12"),
    ]
    frame = load(tmp_path)
    assert [len(tries) for tries in frame["search.tries"]] == list(frame["search.try_num"])


def all_oom(**options: Any) -> str:
    """Return the sentence that a comparison without a row that fits ends with."""
    chosen = plan(**{**FIND, "find": None, **options})
    rows = [first_row(one, status="oom") for one in chosen.configurations]
    (sentence,) = closing(chosen.configurations, rows, options=chosen.options, host=HOST)
    return sentence


def test_without_a_search_the_estimate_bounds_what_fits_where_every_row_is_out_of_memory() -> None:
    sentence = all_oom()
    assert sentence.startswith("Every row is out of memory. By the estimate of state and logits")
    assert "zero3 fits batch 3 at most" in sentence  # it holds the least state
    assert sentence.endswith("--find batch") and "--batch-size 4 " in sentence and "--stages" not in sentence


def test_the_estimate_is_below_every_batch_that_ran_out_of_memory() -> None:
    sentence = all_oom(batch_size=(16, 4))
    assert "fits batch 3 at most" in sentence and "--batch-size 4 " in sentence


def test_a_search_that_something_else_than_memory_ends_says_so(tmp_path) -> None:
    def failing(job) -> Outcome:
        fails = job.kind == "row" and job.settings.batch_size > 5
        return Outcome(status="failed", error="no such kernel") if fails else answer(job)

    rows, _ = run(tmp_path, failing, strategies=("zero3",))
    sentences = closing([], list(rows.values()), options=plan(**FIND).options, host=HOST)
    assert sentences[0] == (
        "zero3 found no larger batch, but not because of memory: batch 6 failed: no such kernel."
    )
    assert sentences[1].startswith("The largest batch that fits is 5, with zero3.")


def test_where_not_one_sequence_fits_the_estimate_is_of_layers() -> None:
    sentence = all_oom(num_layers=(6,), batch_size=(1,), strategies=("zero0",))
    assert "zero0 fits layers" in sentence and sentence.endswith("--find layers")


def test_the_command_of_cpu_ranks_without_a_limit_names_their_share_of_memory() -> None:
    assert all_oom(device_memory_gib=None).endswith("--find batch --memory-limit 128")


def test_a_workload_with_a_row_that_fits_needs_no_estimate() -> None:
    chosen = plan(**{**FIND, "find": None})
    rows = [first_row(one, status="oom") for one in chosen.configurations]
    rows[0].status = "ok"
    assert closing(chosen.configurations, rows, options=chosen.options, host=HOST) == []


def test_measured_rows_hold_the_search_that_is_under_way(tmp_path) -> None:
    def killing(job) -> Outcome:
        if job.settings.batch_size == 8:
            raise Killed
        return answer(job)

    run(tmp_path, killing)
    assert json.loads((tmp_path / "results.json").read_text())["searching"] is None
    assert json.loads((tmp_path / MEASURED).read_text())["searching"]["search"]["try_num"] == 1
