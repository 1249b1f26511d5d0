"""CPU time of other processes, told from a command's own by real ones, and what it makes of a row."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from report_samples import sample

from zerobench.bench.busy import OtherUse, use_by_others, why_busy
from zerobench.host.cpu_use import CpuUse, Process, given_ticks, own_ticks, parse
from zerobench.report import advise, finish_rows, table_text
from zerobench.results.rows import is_ranked

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BURN = "import sys, time\nwhile time.process_time() < float(sys.argv[1]): pass"
BURN_LATER = "import sys, time; sys.stdin.readline()\n" + BURN + "\nprint(time.process_time(), flush=True)"


def burn(cpu_s: float) -> None:
    subprocess.run([sys.executable, "-c", BURN, str(cpu_s)], check=True)


def test_own_time_holds_children_that_ended_since_the_last_read() -> None:
    use = CpuUse(os.getpid())
    before = use.read()
    burn(0.3)
    assert use.read().own_s - before.own_s >= 0.3 - 2 * TICK_S


def test_own_time_holds_a_living_child_once() -> None:
    use = CpuUse(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", BURN_LATER, "0.3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        before, own_before_s = use.read(), time.process_time()
        child.stdin.write("go\n")
        child.stdin.flush()
        child_s = float(child.stdout.readline())
        alive = use.read()
        child.stdin.close()
    most_s = child_s + (time.process_time() - own_before_s) + 10 * TICK_S
    assert use.read().own_s - before.own_s <= most_s
    assert alive.own_s - before.own_s >= 0.3 - 0.1  # what it took to start came before


def test_others_hold_a_process_of_another_command() -> None:
    command = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        use = CpuUse(command.pid)
        before = use.read()
        burn(0.5)
        now = use.read()
    finally:
        command.communicate(b"\n")
    assert now.others_s - before.others_s >= 0.4  # the kernel counts the cores' time in ticks
    assert now.own_s - before.own_s <= 0.1


def test_a_child_that_outlives_its_parent_stays_own() -> None:
    leave = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {BURN!r}, '0.6']).pid, flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{leave}\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    use = CpuUse(os.getpid())
    assert use.is_own(orphan) is True
    parent.communicate("\n")
    use.read()
    assert use.is_own(orphan) is True


def test_a_sibling_of_the_same_launch_is_own() -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "4711"}
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **launch, **other}
        )
        for other in ({}, {"RANK": "1"}, {"RANK": "1", "MASTER_PORT": "4712"})
    ]
    command, sibling, stranger = (process.pid for process in waiting)
    try:
        use = CpuUse(command, environment=launch)
        assert [use.is_own(pid) for pid in (command, sibling, stranger)] == [True, True, False]
        assert CpuUse(command, environment={}).is_own(sibling) is False
    finally:
        for process in waiting:
            process.communicate(b"\n")
    assert use.is_own(1 << 23) is None  # no number of a process


def test_a_process_is_read_whatever_its_name_is() -> None:
    with open("/proc/self/stat", "rb") as stat:
        line = stat.read()
    own = parse(line)
    assert own.parent == os.getppid() and not own.is_kernel
    assert parse(b"7 (a) R 1 (b))" + line.rpartition(b")")[2]) == own


def process(parent: int, used: int, by_children: int = 0, *, start: int = 1) -> Process:
    return Process(
        parent=parent, start=start, is_kernel=False, cpu=0, used=used, used_by_children=by_children
    )


def test_a_number_that_another_process_got_starts_anew() -> None:
    before = {1: process(0, 10), 2: process(1, 500)}
    now = {1: process(0, 11, 520), 2: process(1, 5, start=2)}
    assert own_ticks(before, now) == 1 + 20 + 5


def test_a_child_that_nobody_waited_for_takes_nothing_away() -> None:
    assert own_ticks({1: process(0, 10), 2: process(1, 500)}, {1: process(0, 15)}) == 5


def test_only_time_of_processes_on_allowed_cpus_counts() -> None:
    stat = "cpu 9 9 9 9\ncpu0 1 2 3 100 50 7 7 7\ncpu1 10 20 30 100\ncpu2 5 5 5 5\nintr 1"
    assert given_ticks(stat, {0, 1}) == (66, 2)
    assert given_ticks(stat, {64}) == (81, 3)  # numbers of another namespace


def reading(time_s: float, others_s: float | None, cpu_num: int = 2) -> dict:
    times = None if others_s is None else {"others_s": others_s, "own_s": 0.0, "cpu_num": cpu_num}
    return {"time_s": time_s, "cpu_times": times}


READINGS = [reading(8.0, 0.0), reading(9.0, 5.0), reading(9.5, None), reading(12.5, 6.0), reading(13.0, 9.0)]


def test_a_window_lies_between_the_readings_around_it() -> None:
    found = use_by_others(READINGS, begin_s=9.6, end_s=12.0)
    assert found == OtherUse(1.0 / 3.5, 2)


def test_a_short_window_is_seen_with_the_second_before_its_end() -> None:
    readings = [reading(at / 2, at / 10) for at in range(20)]
    found = use_by_others(readings, begin_s=5.1, end_s=5.2)
    assert found is not None and found.cores == pytest.approx(0.2)
    assert use_by_others([reading(1.0, 0.0)], begin_s=0.9, end_s=1.0) is None
    assert use_by_others([{"time_s": 1.0}], begin_s=0.9, end_s=1.0) is None


def test_more_than_a_tenth_of_the_cores_is_busy() -> None:
    assert why_busy(OtherUse(0.2, 2), []) is None
    assert why_busy(OtherUse(0.33, 2), None) == "other processes used 0.3 of 2 cores"
    assert why_busy(OtherUse(3.0, 64), [1, 2]) == "other processes used GPU 1 and 2"
    assert why_busy(OtherUse(8.0, 64), [0]) == "other processes used 8.0 of 64 cores and GPU 0"
    assert why_busy(None, None) is None


def busy_sample(*strategies: str):
    results = sample()
    for row in results.rows:
        if row.strategy in strategies:
            row.busy = "other processes used 0.8 of 2 cores"
    finish_rows(results)
    return results, {row.strategy: row for row in results.rows}


def test_a_marked_row_is_shown_and_not_ranked() -> None:
    results, rows = busy_sample("zero2")
    assert not is_ranked(rows["zero2"]) and rows["zero2"].relative is None
    assert "zero2" not in " ".join(advise(results))
    text = table_text(results)
    assert (
        "‡ measured on a busy machine, so shown but not ranked: zero2 (other processes used 0.8 of 2" in text
    )
    assert sum("‡" in line for line in text.splitlines()) == 2


def test_a_marked_baseline_is_none() -> None:
    _, rows = busy_sample("ddp")
    assert rows["zero1"].baseline == rows["single"].name


def test_rows_that_were_all_marked_recommend_nothing() -> None:
    results, rows = busy_sample(*(row.strategy for row in sample().rows))
    assert advise(results) == [
        "Nothing to recommend: the machine was busy. Measure again once nothing else runs on it."
    ]
    assert all(row.relative is None for row in rows.values())
