"""Rows of a comparison as they come: judged, repeated, saved, and kept after Ctrl-C."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from comparison_samples import (
    HOST,
    TWO_GPUS,
    Answering,
    ended_well,
    execution,
    place,
    plan,
    quiet_display,
)
from rich.console import Console

from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.output import OutputFolder
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.rank import worker
from zerobench.bench.run import run_comparison
from zerobench.bench.sampler import Sampler
from zerobench.bench.schedule import schedule, task_num
from zerobench.bench.session import Session
from zerobench.bench.surroundings import read_surroundings
from zerobench.errors import DataError
from zerobench.results.files import read_results


def statuses(folder) -> list[str]:
    return [row.status for row in read_results(folder).rows]


def test_a_tie_of_checksums_is_undone_by_the_rows_that_follow(tmp_path) -> None:
    chosen = plan(strategies=("zero0", "zero1", "zero2", "zero3"), repeats=2)
    seen, repeated = [], []

    def answer(job) -> Outcome:
        seen.append(statuses(tmp_path))
        if job.verify:
            return ended_well(job, checksum="odd" if job.strategy == "zero1" else "even")
        repeated.append(job.strategy)
        return Outcome(status="failed", error="no") if job.strategy == "zero2" else Outcome(status="oom")

    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    session.write()
    with Answering(answer) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
    # What results.json holds when the reference, the four rows and the first repeat start.
    assert seen[:3] == [[], [], ["ok"]]
    assert seen[3:6] == [["wrong"] * 2, ["ok", "wrong", "ok"], ["ok", "wrong", "ok", "ok"]]
    assert repeated == ["zero0", "zero2", "zero3"]  # nothing is measured again of what is wrong
    assert statuses(tmp_path) == ["oom", "wrong", "failed", "oom"]


def test_a_repeat_adds_its_samples_or_takes_all_figures_away(tmp_path) -> None:
    chosen = plan(strategies=("zero0", "zero1", "zero2"), repeats=2)

    def answer(job) -> Outcome:
        if job.verify:
            return ended_well(job, step_times_ms=[10.0, 10.0])
        assert job.measure
        if job.strategy == "zero2":
            return Outcome(status="oom", error="no memory", oom_tier="host")
        losses = [2.0, math.nan] if job.strategy == "zero1" else [2.0, 1.0]
        return ended_well(job, step_times_ms=[30.0, 30.0], losses=losses)

    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    with Answering(answer) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
    zero0, zero1, zero2 = session.results.rows
    assert zero0.status == "ok" and zero0.step_time_ms is not None
    assert zero0.step_time_ms.samples == [10.0, 10.0, 30.0, 30.0]
    assert zero1.status == "failed"
    assert (zero1.error or "").startswith("repeat 2: the loss of measured step 2 is not finite")
    assert (zero2.status, zero2.error, zero2.oom_tier) == ("oom", "repeat 2: no memory", "host")
    for row in (zero1, zero2):
        assert row.step_time_ms is row.tokens_per_s is row.peak_device_bytes is row.loss is None
    assert session.results.complete


def test_ctrl_c_while_rows_are_judged_shows_those_that_were(tmp_path) -> None:
    chosen = plan(strategies=("zero0", "zero1"))

    def judge(results, baseline) -> None:
        if len(results.rows) == 2:
            raise KeyboardInterrupt

    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path), judge=judge)
    with (
        Answering(lambda job: ended_well(job, checksum=job.strategy)) as launcher,
        pytest.raises(KeyboardInterrupt),
    ):
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
    assert [row.strategy for row in session.results.rows] == ["zero0"]


def test_a_reference_file_is_there_until_the_last_row_of_its_group_has_run(tmp_path) -> None:
    chosen = plan(strategies=("zero1", "zero3"), precision=("fp32", "bf16"))
    kept = []

    def answer(job) -> Outcome:
        kept.append(len(list(launcher.scratch.glob("*.pt"))))
        if job.kind == "reference":
            Path(job.reference_file).touch()
        return ended_well(job)

    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    with Answering(answer) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
        assert kept == [0, 1, 1, 0, 1, 1] and not list(launcher.scratch.glob("*.pt"))


class Counting(ProgressDisplay):
    """Counts the runs that are over."""

    done = 0

    def skip(self) -> None:
        self.done += 1
        super().skip()


def test_progress_counts_what_is_not_started_too(tmp_path) -> None:
    chosen = plan(strategies=("zero0", "zero1", "zero2"), repeats=2)
    host = replace(
        HOST, why_not_lockable=lambda row: "no memory to lock" if row.strategy == "zero1" else None
    )
    display = Counting(Console(file=io.StringIO()), task_num(schedule(chosen)))
    session = Session(chosen, host=host, output=OutputFolder(tmp_path))
    with Answering(ended_well) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher, host=host), display)
    assert [row.status for row in session.results.rows] == ["ok", "oom", "ok"]
    assert display.done == task_num(schedule(chosen)) == 6 + 1


def test_results_say_what_ranks_were_told(tmp_path) -> None:
    chosen = plan(**TWO_GPUS)
    session = Session(chosen, host=read_surroundings(chosen.options), output=OutputFolder(tmp_path))
    machine = session.results.machine
    assert machine["details"]["rank_environment"] == {"NCCL_NVLS_ENABLE": "0"}
    assert [gpu["name"] for gpu in machine["gpus"]] == ["NVIDIA H200"] * 2


def test_gpus_in_use_before_the_first_row_are_a_warning(tmp_path) -> None:
    session = Session(plan(**TWO_GPUS), host=HOST, output=OutputFolder(tmp_path))
    gpu = {"used_bytes": 0, "utilisation_pct": 0, "pids": [3]}
    sampler = Sampler(tmp_path / "samples.jsonl")
    sampler.path.write_text(json.dumps({"time_s": 1.0, "gpus": [gpu, None]}) + "\n")
    session.warn_of_sharing(sampler)
    (warning,) = session.results.warnings
    assert warning.startswith("another process uses GPU 0")


def test_ranks_train_on_the_bytes_that_the_comparison_began_with(tmp_path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a" * 1000)
    launcher = Answering(ended_well)
    code = run_comparison(
        plan(strategies=("zero1",), data=str(text)),
        output_dir=tmp_path / "out",
        host=HOST,
        launcher=launcher,
        console=Console(file=io.StringIO()),
        notes=Console(file=io.StringIO()),
    )
    assert code == 0 and [job.kind for job in launcher.jobs] == ["reference", "row"]
    for job in launcher.jobs:
        worker.open_batches(job, worker.strategy_settings(job, place()), job.model)
    text.write_bytes(b"b" * 1000)
    for job in launcher.jobs:
        with pytest.raises(DataError, match="does not hold the bytes that the comparison began with"):
            worker.open_batches(job, worker.strategy_settings(job, place()), job.model)


def given(**options):
    """Return a plan under a launcher that started the ranks, where rows cannot stay alive."""
    return plan(strategies=("zero0", "zero1", "zero2"), rounds=15, host_ranks=2, **options)


def test_rows_that_cannot_be_alive_together_are_measured_in_interleaved_passes(tmp_path) -> None:
    chosen = given()
    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    with Answering(partial(ended_well, step_times_ms=[100.0, 50.0])) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
        passes = launcher.jobs[4:]  # after the reference and three rows alone
    assert [job.strategy for job in passes] == ["zero0", "zero1", "zero2"] * 3
    assert {(job.verify, job.measure, job.profile_steps, job.validation_batches) for job in passes} == {
        (False, True, 0, 0)
    }
    assert {job.settings.num_steps for job in passes} == {10}
    for row in session.results.rows:
        assert row.turns is not None and row.step_time_ms is not None
        assert (row.turns.how, row.turns.windows_ms) == ("passes", [[75.0]] * 3)
        assert row.step_time_ms.samples == [75.0] * 3
        assert row.settings.num_steps != 10  # what was asked for
    assert session.results.complete


def test_rows_that_do_not_fit_into_memory_together_are_measured_in_passes(tmp_path) -> None:
    chosen = plan(strategies=("zero0", "zero1"), rounds=15)
    available = HOST.memory_available_bytes()

    def answer(job) -> Outcome:
        nonlocal available
        available = 1 << 30  # a row of two ranks that needs less than one such took more than half of it
        return ended_well(job, peak_host_bytes=300 << 20)

    host = replace(HOST, memory_available_bytes=lambda: available)
    session = Session(chosen, host=host, output=OutputFolder(tmp_path))
    with Answering(answer) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher, host=host), quiet_display())
    assert [row.turns and row.turns.how for row in session.results.rows] == ["passes", "passes"]


def test_more_repeats_are_more_passes_and_none_alone(tmp_path) -> None:
    chosen = given(repeats=4)
    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    with Answering(ended_well) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
        assert len(launcher.jobs) == 4 + 3 * 4


def test_a_row_that_fails_in_a_pass_loses_its_figures_and_the_others_go_on(tmp_path) -> None:
    chosen, seen = given(), []

    def answer(job) -> Outcome:
        seen.append(job.strategy)
        if seen.count("zero1") == 3 and job.strategy == "zero1":  # alone, then in two passes
            return Outcome(status="oom", error="no memory", oom_tier="host")
        return ended_well(job)

    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    with Answering(answer) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
    zero0, zero1, zero2 = session.results.rows
    assert (zero1.status, zero1.error, zero1.oom_tier) == ("oom", "pass 2: no memory", "host")
    assert zero1.turns is zero1.step_time_ms is None and seen.count("zero1") == 3
    for row in (zero0, zero2):
        assert row.status == "ok" and row.turns is not None and len(row.turns.windows_ms) == 3


def test_a_row_that_has_no_other_is_measured_alone(tmp_path) -> None:
    chosen = plan(strategies=("zero0",), rounds=15, repeats=2)
    session = Session(chosen, host=HOST, output=OutputFolder(tmp_path))
    with Answering(ended_well) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
        assert len(launcher.jobs) == 3  # the reference, and the row twice
    assert session.results.rows[0].turns is None
