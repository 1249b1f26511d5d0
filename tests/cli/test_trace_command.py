"""`compare --trace` and `zerobench trace`: what a real step leaves, and what is told of it."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from conftest import SMALL


@pytest.fixture(scope="module")
def traced(shared_command):
    (shared_command.folder / "disk").mkdir()
    result = shared_command.run(
        "compare", *SMALL, "--strategies", "zero3,ddp", "--offload", "none,nvme", "--nvme-path", "disk", "--trace",
        "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return shared_command


ROWS = {
    "zs3_fp32_ranks2_bs2_sl32": {"compute", "gather", "reduce", "update"},
    "zs3_fp32_ranks2_bs2_sl32_offload-nvme": {"compute", "gather", "reduce", "CPU Adam"},
    "ddp_fp32_ranks2_bs2_sl32": {"compute", "communication", "update"},
}


def events_of(command, row: str) -> list[dict[str, Any]]:
    content = (command.folder / "out" / "traces" / f"{row}.json.gz").read_bytes()
    return json.loads(gzip.decompress(content))["traceEvents"]


def test_each_row_that_ran_has_a_trace(traced) -> None:
    files = {path.name for path in (traced.folder / "out" / "traces").iterdir()}
    assert files == {f"{row}.json.gz" for row in ROWS}


@pytest.mark.parametrize("row", ROWS)
def test_lanes_are_those_of_the_strategy(traced, row) -> None:
    lanes = {event["cat"] for event in events_of(traced, row) if event["ph"] == "X"}
    assert ROWS[row] <= lanes
    assert ("gather" in lanes) == row.startswith("zs3")


@pytest.mark.parametrize("row", ROWS)
def test_viewers_can_read_it(traced, row) -> None:
    events = events_of(traced, row)
    named = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    work = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in work} == named
    assert [event["ts"] for event in work] == sorted(event["ts"] for event in work)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == 0 for event in work)
    assert len(events) == len(work) + len([event for event in events if event["ph"] == "M"])


def test_the_command_accounts_for_the_step(traced) -> None:
    row = "zs3_fp32_ranks2_bs2_sl32"
    found = json.loads(traced.run("trace", f"out#{row}", "--json").stdout)
    assert found["busy_us"] + found["idle_us"] == pytest.approx(found["step_us"])
    computing_us = next(use["busy_us"] for use in found["lanes"] if use["lane"] == "compute")
    assert computing_us + sum(found["waited_us"].values()) == pytest.approx(found["step_us"])
    assert {unit["unit"] for unit in found["units"]} >= {"root", "blocks.0", "blocks.1"}
    assert found["verdict"].startswith(f"{row}, rank 0: a step of ")


def test_the_command_shows_tables_of_a_file(traced) -> None:
    shown = traced.run("trace", "out/traces/zs3_fp32_ranks2_bs2_sl32.json.gz").stdout
    for head in ("lane ", "unit, busy (exposed) ms", "computing waits for"):
        assert head in shown
