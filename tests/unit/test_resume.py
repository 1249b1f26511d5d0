"""`compare --resume` and `--max-minutes`: what is kept of an earlier comparison, and what runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from comparison_samples import HOST, Answering, ended_well, execution, plan, quiet_display
from rich.console import Console

from zerobench.bench import session as sessions
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.output import MEASURED, OutputFolder
from zerobench.bench.plan.configuration import Plan
from zerobench.bench.resume import earlier_rows
from zerobench.bench.schedule import schedule
from zerobench.bench.session import Session
from zerobench.bench.surroundings import Surroundings
from zerobench.errors import ConfigError
from zerobench.results.files import read_results
from zerobench.results.schema import Results

pytestmark = pytest.mark.slow  # draws

ALL = ("zero0", "zero1", "zero2", "zero3")


class Killed(BaseException):
    """In place of a signal that ends the command at once."""


def run(chosen: Plan, folder: Path, answer, *, resumed: bool = False, host: Surroundings = HOST) -> list[str]:
    """Run a comparison, or go on with one, and return the strategies of the jobs that ran, in order."""
    output = OutputFolder(folder, resumed=resumed)
    session = Session(chosen, host=host, output=output)
    session.results.data_digest = "of the data"
    with Answering(answer) as launcher:
        if resumed:
            session.go_on_from(*earlier_rows(folder, chosen, host=host, data_digest="of the data"))
        try:
            session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
            session.end(
                interrupted=False, console=Console(file=io.StringIO()), notes=Console(file=io.StringIO())
            )
        except Killed:
            pass
        return [job.strategy for job in launcher.jobs]


def killed_at(strategy: str, **figures):
    def answer(job) -> Outcome:
        if job.strategy == strategy:
            raise Killed
        return ended_well(job, **figures)

    return answer


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["strategy"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}


def test_what_is_missing_runs_and_what_was_measured_stays(tmp_path) -> None:
    chosen = plan(strategies=ALL)
    run(chosen, tmp_path, killed_at("zero2", step_times_ms=[10.0, 11.0]))
    before = rows_of(tmp_path)
    assert list(before) == ["zero0", "zero1"]
    jobs = run(chosen, tmp_path, lambda job: ended_well(job, step_times_ms=[20.0, 21.0]), resumed=True)
    assert jobs == ["single", "zero2", "zero3"]  # the reference again, for what it verifies
    after = rows_of(tmp_path)
    for strategy in before:
        for key in ("step_time_ms", "checksum", "started", "log", "memory_bytes", "phases_ms", "status"):
            assert after[strategy][key] == before[strategy][key]
    assert after["zero3"]["step_time_ms"]["samples"] == [20.0, 21.0]
    assert read_results(tmp_path).complete


def test_rows_are_judged_anew(tmp_path) -> None:
    """One of two rows has another checksum: nobody can be trusted, until more rows agree with the other."""
    chosen = plan(strategies=ALL)

    def first(job) -> Outcome:
        if job.strategy == "zero2":
            raise Killed
        return ended_well(job, checksum="odd" if job.strategy == "zero1" else "even")

    run(chosen, tmp_path, first)
    assert {row["status"] for row in rows_of(tmp_path).values()} == {"wrong"}
    run(chosen, tmp_path, lambda job: ended_well(job, checksum="even"), resumed=True)
    after = rows_of(tmp_path)
    assert [after[strategy]["status"] for strategy in ALL] == ["ok", "wrong", "ok", "ok"]
    assert after["zero0"]["step_time_ms"] is not None


def test_failed_rows_are_finished_rows(tmp_path) -> None:
    chosen = plan(strategies=ALL)

    def first(job) -> Outcome:
        if job.strategy == "zero3":
            raise Killed
        return Outcome(status="failed", error="no") if job.strategy == "zero1" else ended_well(job)

    run(chosen, tmp_path, first)
    assert run(chosen, tmp_path, ended_well, resumed=True) == ["single", "zero3"]
    assert rows_of(tmp_path)["zero1"]["error"] == "no"


def test_a_grown_grid_runs_the_new_rows(tmp_path) -> None:
    run(plan(strategies=("zero0",)), tmp_path, ended_well)
    assert run(plan(strategies=("zero0", "zero1")), tmp_path, ended_well, resumed=True) == ["single", "zero1"]
    assert list(rows_of(tmp_path)) == ["zero0", "zero1"]


def test_a_grid_that_grew_by_a_model_keeps_its_rows_under_their_new_names(tmp_path) -> None:
    run(plan(strategies=("zero0",)), tmp_path, ended_well)
    (before,) = rows_of(tmp_path).values()
    grown = plan(strategies=("zero0",), model=("tiny", "gpt-64m"))
    assert run(grown, tmp_path, ended_well, resumed=True) == ["single", "zero0"]
    after, other = read_results(tmp_path).rows
    assert (after.settings.model, other.settings.model) == ("tiny", "gpt-64m")
    assert after.started == before["started"] and after.name == f"{before['name']}_tiny_l4_h64"


def test_options_that_leave_out_measured_rows_are_refused(tmp_path) -> None:
    run(plan(strategies=ALL), tmp_path, ended_well)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(ConfigError, match=r"do not ask for, and would lose them: zs1_\S+ and zs2_\S+ Give"):
        run(plan(strategies=("zero0", "zero3")), tmp_path, ended_well, resumed=True)
    assert (tmp_path / "results.json").read_bytes() == before


def test_repeats_that_are_there_are_not_measured_again(tmp_path) -> None:
    times = {"step_times_ms": [10.0, 11.0]}
    run(
        plan(strategies=("zero0", "zero1"), repeats=1, num_steps=2),
        tmp_path,
        lambda job: ended_well(job, **times),
    )
    more = plan(strategies=("zero0", "zero1"), repeats=3, num_steps=2)
    assert run(more, tmp_path, lambda job: ended_well(job, **times), resumed=True) == ["zero0", "zero1"] * 2
    assert len(rows_of(tmp_path)["zero0"]["step_time_ms"]["samples"]) == 6


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (replace(HOST, versions={"torch": "9"}), r"other versions \(torch None, now 9\)"),
        (
            replace(HOST, machine={"cpu": "another", "details": {}}),
            r"other machine \(cpu of a test, now another\)",
        ),
    ],
)
def test_another_machine_or_version_is_refused(tmp_path, host: Surroundings, words: str) -> None:
    chosen = plan(strategies=ALL)
    run(chosen, tmp_path, killed_at("zero2"))
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(ConfigError, match=words):
        run(chosen, tmp_path, ended_well, resumed=True, host=host)
    assert (tmp_path / "results.json").read_bytes() == before


def test_other_data_and_another_seed_are_refused(tmp_path) -> None:
    run(plan(strategies=ALL), tmp_path, killed_at("zero2"))
    with pytest.raises(ConfigError, match="other data"):
        earlier_rows(tmp_path, plan(strategies=ALL), host=HOST, data_digest="changed")
    with pytest.raises(ConfigError, match="seed 0, and now it would have 7"):
        earlier_rows(tmp_path, plan(strategies=ALL, seed=7), host=HOST, data_digest="of the data")


def test_a_folder_without_measured_rows_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        earlier_rows(tmp_path, plan(), host=HOST, data_digest=None)


def test_nothing_new_begins_after_the_given_minutes(tmp_path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    chosen = plan(strategies=ALL, max_minutes=10.0)

    def answer(job) -> Outcome:
        now[0] += 200.0
        return ended_well(job)

    output = OutputFolder(tmp_path)
    session, said = Session(chosen, host=HOST, output=output), io.StringIO()
    with Answering(answer) as launcher:
        session.run(schedule(chosen), execution(chosen, launcher), quiet_display())
        code = session.end(
            interrupted=False, console=Console(file=io.StringIO()), notes=Console(file=said, width=500)
        )
    found = read_results(tmp_path)
    assert [row.strategy for row in found.rows] == ["zero0", "zero1", "zero2"] and not found.complete
    assert code == 0
    assert said.getvalue().startswith("stopped after 10 minutes: 3 of 4 rows are complete and kept")
    assert f"--resume {tmp_path}" in said.getvalue()


def test_measured_rows_are_a_result_file(tmp_path) -> None:
    run(plan(strategies=ALL), tmp_path, ended_well)
    assert isinstance(read_results(tmp_path / MEASURED), Results)
