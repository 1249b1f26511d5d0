"""Accumulation that follows from --global-batch, and what --dry-run tells."""

from __future__ import annotations

import io
import json
import shlex

import pytest
from comparison_samples import HOST, Answering, execution, log_of, quiet_display
from plan_samples import SMALL
from rich.console import Console

from zerobench.bench.assess import first_row
from zerobench.bench.dry_run import dry_run
from zerobench.bench.plan.configuration import Plan
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.schedule import schedule
from zerobench.errors import ConfigError
from zerobench.results.schema import Results


def plan(**options) -> Plan:
    return make_plan(CompareOptions(**{**SMALL, **options}))


def test_accumulation_follows_from_batch_and_ranks() -> None:
    found = plan(strategies=("single", "zero1"), batch_size=(2, 4), global_batch=16).configurations
    assert [(c.settings.world_size, c.settings.batch_size, c.settings.grad_accum) for c in found] == [
        (1, 2, 8), (2, 2, 4), (1, 4, 4), (2, 4, 2),
    ]  # fmt: skip
    assert len({c.reference_group() for c in found if c.settings.batch_size == 2}) == 1


def test_a_row_that_cannot_have_the_global_batch_is_skipped_with_the_reason() -> None:
    found = plan(strategies=("zero1",), batch_size=(2, 3), global_batch=16)
    step = schedule(found)[1]
    with Answering(pytest.fail) as launcher:
        row, started = execution(found, launcher).verify_and_measure(
            step, log=log_of(launcher), track=quiet_display().task
        )
    assert (row.status, started) == ("skipped", False)
    assert row.error is not None and "is not a multiple of 6" in row.error
    words = shlex.split(rerun_command(step.configuration, found.options))
    assert "--global-batch" in words and "--grad-accum" not in words


def test_a_global_batch_that_no_row_can_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no row can run: --global-batch 7 is not a multiple of 8"):
        plan(strategies=("zero1",), batch_size=(4,), global_batch=7)


def test_the_reason_is_that_of_the_rows_with_most_ranks() -> None:
    with pytest.raises(
        ConfigError, match=r"not a multiple of 6, the sequences of a micro-batch \(3 on each of 2 ranks"
    ):
        plan(strategies=("single", "zero1"), batch_size=(3,), global_batch=7)


def test_accumulation_is_not_given_twice() -> None:
    with pytest.raises(ConfigError, match="remove --grad-accum"):
        plan(grad_accum=(2,), global_batch=16)


def test_a_file_that_accumulates_otherwise_is_refused(tmp_path) -> None:
    files = tmp_path / "a.json", tmp_path / "b.json"
    files[0].write_text('{"stage": 1, "gradient_accumulation_steps": 3}')
    files[1].write_text('{"stage": 1}')
    options = {key: value for key, value in SMALL.items() if key != "strategies"}
    asked = CompareOptions(**options, config=files, batch_size=(2,), global_batch=16)
    first, second = make_plan(asked).configurations
    assert first.refused is not None and "remove gradient_accumulation_steps" in first.refused
    assert second.refused is None and second.settings.grad_accum == 4


def told(found: Plan, tmp_path) -> str:
    text = io.StringIO()
    console = Console(file=text, width=500)
    code = dry_run(
        found,
        output_dir=tmp_path / "new",
        host=HOST,
        launcher=Answering(pytest.fail),
        console=console,
        notes=console,
    )
    assert code == 0
    return text.getvalue()


@pytest.mark.slow  # it asks strategies, which import torch
def test_a_dry_run_tells_what_would_be_skipped_and_how_long_the_rest_takes(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan(strategies=("zero1", "zero3", "fsdp1"), batch_size=(2, 3), global_batch=16)
    assert "No earlier results" in told(found, tmp_path)
    row = first_row(found.configurations[0], status="ok")
    row.duration_s = 90.0
    (tmp_path / "old").mkdir()
    earlier = Results(created="2026", machine=HOST.machine, versions={}, command="c", rows=[row])
    (tmp_path / "old" / "results.json").write_text(earlier.model_dump_json())
    lines = told(found, tmp_path).splitlines()
    assert lines[0] == f"{row.name}: about 2 min"
    assert "zs3_fp32_ranks2_bs2_sl64_ga4" in lines
    assert any(line.startswith("fsdp1") and "skipped: FSDP1 shards on GPUs only" in line for line in lines)
    assert lines[-1] == "6 rows, of which 2 would run. By earlier results 1 of them take about 2 min."
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_what_took_long_on_another_machine_tells_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan(strategies=("zero1",))
    row = first_row(found.configurations[0], status="ok")
    row.duration_s = 90.0
    (tmp_path / "old").mkdir()
    earlier = Results(created="2026", machine={"cpu": "another"}, versions={}, command="c", rows=[row])
    (tmp_path / "old" / "results.json").write_text(earlier.model_dump_json())
    assert "No earlier results" in told(found, tmp_path)


@pytest.mark.slow
def test_a_dry_run_can_be_one_json_document(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert told(plan(strategies=("zero1",), as_json=True), tmp_path) == ""
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"].startswith("1 row, of which 1 would run.")
    assert [row["name"] for row in document["rows"]] == ["zs1_fp32_ranks2_bs4_sl64"]
