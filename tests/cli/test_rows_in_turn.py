"""Rows that are alive together and take turns: what they give, and what happens when one of them ends early."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from conftest import SMALL, until

ROUNDS = 3
IN_TURN = [*SMALL[:-2], "--rounds", str(ROUNDS)]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def test_rows_in_turn_have_equal_windows_and_the_memory_and_phases_of_the_row_alone(command) -> None:
    result = command.run(
        "compare", *IN_TURN, "--strategies", "zero1,ddp", "--repeats", "2", "--output-dir", "out"
    )
    assert result.returncode == 0, result.stderr
    alone = command.run("compare", *SMALL, "--strategies", "zero1,ddp", "--output-dir", "alone")
    assert alone.returncode == 0, alone.stderr
    for strategy, row in command.rows().items():
        turns = row["turns"]
        assert turns["how"] == "in turn" and turns["group"] == "workload 1"
        assert [len(run) for run in turns["windows_ms"]] == [ROUNDS, ROUNDS]
        assert row["step_time_ms"]["samples"] == [time for run in turns["windows_ms"] for time in run]
        lonely = command.rows("alone")[strategy]
        assert lonely["turns"] is None
        # Of a model this small, work that happens to overlap is a good part of the peak.
        assert row["peak_device_bytes"] == pytest.approx(lonely["peak_device_bytes"], rel=0.5)
        assert row["memory_bytes"] == lonely["memory_bytes"] and row["loss"] == lonely["loss"]
        assert row["phases_ms"].keys() == lonely["phases_ms"].keys()
    assert f"Measured in turn: all rows; {ROUNDS} rounds x" in result.stdout
    assert command.leaves_nothing()


TROUBLES = ("KilledInTurn", "RaisesInTurn", "StallsInTurn", "FitsAlone")


@pytest.fixture(scope="module")
def troubled(shared_command):
    """Rows that end or stall in their second turn, and two that do not."""
    strategies = ",".join([*(f"troubles:{name}" for name in TROUBLES), "single", "faulty:PlainDataParallel"])
    result = shared_command.run(
        "compare", *IN_TURN, "--strategies", strategies, "--timeout", "6", "--output-dir", "out"
    )
    return shared_command, result


def test_rows_that_end_or_stall_in_their_turn_fail_and_the_others_go_on(troubled) -> None:
    command, result = troubled
    assert result.returncode == 1 and "Traceback" not in result.stderr + result.stdout, result.stderr
    rows = command.rows()
    for name in TROUBLES[:3]:
        assert rows[name]["status"] == "failed" and rows[name]["step_time_ms"] is rows[name]["turns"] is None
    assert rows["KilledInTurn"]["error"].startswith(
        "in turn, run 1: rank 1 was killed by SIGKILL: after step"
    )
    assert rows["KilledInTurn"]["error"].endswith("of window 2")
    assert rows["RaisesInTurn"]["error"] == "in turn, run 1: rank 1: ValueError: cursed"
    assert rows["StallsInTurn"]["error"].startswith("in turn, run 1: no progress for 6 s (--timeout): ")
    assert "rank 1 in trouble (troubles.py:" in rows["StallsInTurn"]["error"]
    for name in ("single", "PlainDataParallel"):
        assert rows[name]["status"] == "ok", rows[name]["error"]
        assert rows[name]["turns"]["how"] == "in turn"
        assert [len(run) for run in rows[name]["turns"]["windows_ms"]] == [ROUNDS]
    assert command.leaves_nothing()


def test_a_row_for_which_others_leave_no_memory_is_measured_in_passes(troubled) -> None:
    command, result = troubled
    row = command.rows()["FitsAlone"]
    assert row["status"] == "ok" and row["turns"]["how"] == "passes", row["error"]
    assert [len(run) for run in row["turns"]["windows_ms"]] == [1, 1, 1]
    assert "one window each: troubles:FitsAlone; 3 runs x" in " ".join(result.stdout.split())


def stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def parent_of(pid: int) -> int:
    return int(stat(pid)[1])


def cpu_ticks(pid: int) -> int:
    """Return the time in user and system mode."""
    return int(stat(pid)[11]) + int(stat(pid)[12])


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_ranks_that_wait_for_their_turn_use_no_cpu_time_and_ctrl_c_ends_them(command) -> None:
    process = command.start(
        "compare", *IN_TURN, "--strategies", "zero1,ddp,troubles:LongTurn", "--output-dir", "out"
    )
    noted = command.folder / "long-turn"
    until(process, noted.exists, else_="no row had its turn for long")
    server = parent_of(int(noted.read_text()))  # of the row that has its turn
    waiting = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and f"ZEROBENCH_TEST_MARK={command.mark}".encode() in environment(entry)
        if name_of(int(entry.name)).startswith("zerobench-r") and parent_of(int(entry.name)) != server
    ]
    assert len(waiting) == 4  # of zero1 and ddp
    time.sleep(1)  # in which threads that spin after their last work go to sleep
    before = {pid: cpu_ticks(pid) for pid in waiting}
    time.sleep(4)
    used_s = {pid: (cpu_ticks(pid) - ticks) / TICKS_PER_S for pid, ticks in before.items()}
    assert max(used_s.values()) <= 0.04, used_s  # one per cent of a core: watchdogs of process groups look up
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr + stdout, stderr
    rows = command.rows()
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert all(row["turns"] is None and row["step_time_ms"] for row in rows.values())
    assert command.leaves_nothing()


def environment(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""
