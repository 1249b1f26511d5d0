"""Pipelines beside DDP by the command."""

from __future__ import annotations

import json

import pytest
from conftest import SMALL


@pytest.fixture(scope="module")
def pipelines(shared_command):
    result = shared_command.run(
        "compare", *SMALL, "--num-layers", "4", "--strategies", "ddp,pipeline", "--pipeline-schedule",
        "gpipe,interleaved", "--micro-batches", "4", "--grad-accum", "2", "--clip", "0.5", "--output-dir", "out",
    )  # fmt: skip
    return shared_command, result


def rows_of(command):
    results = json.loads((command.folder / "out" / "results.json").read_text())
    return {row["settings"]["pipeline_schedule"]: row for row in results["rows"]}


def test_a_pipeline_is_ok_beside_ddp(pipelines):
    command, result = pipelines
    assert result.returncode == 0, result.stderr
    rows = rows_of(command)
    assert {schedule: row["status"] for schedule, row in rows.items()} == dict.fromkeys(
        (None, "gpipe", "interleaved"), "ok"
    )
    for row in rows.values():
        assert row["deviation"]["reads"] == 0
        assert row["deviation"]["evaluation"] <= row["deviation"]["tolerance"]["evaluation"]


def test_the_measured_bubble_stands_by_the_formula(pipelines):
    command, _ = pipelines
    rows = rows_of(command)
    assert rows[None]["bubble_pct"] is None
    assert rows["gpipe"]["bubble_formula_pct"] == pytest.approx(20)
    assert rows["interleaved"]["bubble_formula_pct"] == pytest.approx(100 / 9)
    assert all(0 < rows[schedule]["bubble_pct"] < 100 for schedule in ("gpipe", "interleaved"))


def test_the_losses_are_those_of_ddp(pipelines):
    command, _ = pipelines
    rows = rows_of(command)
    for schedule in ("gpipe", "interleaved"):
        assert rows[schedule]["loss"] == pytest.approx(rows[None]["loss"], rel=1e-4)
