"""A grid that is killed half way and goes on: every row ends with the status that it deserves."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from conftest import SMALL, until

FAULTY = [
    "troubles:Killed",
    "troubles:Raises",
    "troubles:Stalls",
    "troubles:TakesTooMuchPython",
    "faulty:HalvedGradient",
]
TIMEOUT_S = 20


def kill_after(command, rows: int, *arguments: str) -> list[dict[str, Any]]:
    """Kill the comparison once it has that many rows, and return them."""
    process = command.start("compare", *arguments, "--output-dir", "out")
    results = command.folder / "out" / "results.json"

    def has_rows() -> bool:
        return results.exists() and len(json.loads(results.read_text())["rows"]) >= rows

    until(process, has_rows, else_="the rows did not come", within_s=600)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return json.loads(results.read_text())["rows"]


def expect_kept(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    by_name = {row["name"]: row for row in after}
    for row in before:
        now = by_name[row["name"]]
        assert [now[key] for key in ("started", "log", "checksum", "duration_s")] == [
            row[key] for key in ("started", "log", "checksum", "duration_s")
        ]
        if row["status"] == now["status"] == "ok":
            for key in ("step_time_ms", "memory_bytes", "phases_ms", "loss", "peak_device_bytes"):
                assert now[key] == row[key], (row["name"], key)


def test_a_killed_comparison_goes_on_with_what_it_lacks(command) -> None:
    grid = [*SMALL, "--strategies", "zero0,zero1,troubles:Raises,zero3"]
    before = kill_after(command, 2, *grid)
    result = command.run("compare", *grid, "--resume", "out")
    assert "Traceback" not in result.stderr + result.stdout
    assert result.returncode == 1, result.stderr  # a row failed
    after = json.loads((command.folder / "out/results.json").read_text())
    assert after["complete"]
    assert [row["status"] for row in after["rows"]] == ["ok", "ok", "failed", "ok"]
    assert len({row["checksum"] for row in after["rows"] if row["status"] == "ok"}) == 1
    expect_kept(before, after["rows"])
    other = command.run("compare", *grid, "--seed", "1", "--resume", "out")
    assert other.returncode == 2 and "was measured with seed 0" in other.stderr
    assert command.leaves_nothing()


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_grid_of_forty_with_planted_failures_ends_as_if_it_had_run_at_once(command) -> None:
    strategies = [f"zero{stage}" for stage in range(4)] + ["single", *FAULTY]
    grid = [
        *SMALL, "--strategies", ",".join(strategies), "--batch-size", "1,2", "--grad-accum", "1,2", "--timeout",
        str(TIMEOUT_S), "--rank-memory-gib", "4",
    ]  # fmt: skip
    before = kill_after(command, 17, *grid)
    result = command.run("compare", *grid, "--resume", "out", timeout_s=1200)
    assert "Traceback" not in result.stderr + result.stdout
    rows = json.loads((command.folder / "out/results.json").read_text())["rows"]
    assert len(rows) == 40
    deserved = {"Killed": "failed", "Raises": "failed", "Stalls": "failed", "TakesTooMuchPython": "oom"}
    for row in rows:
        kind = row["strategy"].rpartition(":")[2]
        expected = "wrong" if row["strategy"].startswith("faulty:") else deserved.get(kind, "ok")
        assert row["status"] == expected, (row["name"], row["error"])
    expect_kept(before, rows)
    assert command.leaves_nothing()
