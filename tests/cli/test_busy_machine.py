"""A busy process that runs during some rows marks these rows and no others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import SMALL, Command, until

from zerobench.host.cpu_use import CpuUse

NOISE_PCT = 5.0  # half of what marks a row
THIRD_OF_A_CORE = (
    "import time\nstart_s = time.monotonic()\n"
    "while True:\n"
    "    while time.process_time() < (time.monotonic() - start_s) / 3: pass\n"
    "    time.sleep(0.01)"
)


class Quiet:
    """Skips the test where something else than the test uses its cores."""

    def __init__(self) -> None:
        self._use = CpuUse(os.getpid())
        self._last, self._last_s = self._use.read(), time.monotonic()

    def expect(self) -> None:
        now, now_s = self._use.read(), time.monotonic()
        others_s, passed_s = now.others_s - self._last.others_s, now_s - self._last_s
        if 100.0 * others_s > NOISE_PCT * now.cpu_num * passed_s:
            pytest.skip(f"other processes use {others_s / passed_s:.1f} of {now.cpu_num} cores")
        self._last, self._last_s = now, now_s


@pytest.fixture
def two_cores() -> Iterator[None]:
    """The test and all that it starts."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("a third of a core for others and a row take two cores")
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


def row_num(command: Command) -> int:
    with contextlib.suppress(OSError, ValueError):
        return len(json.loads((command.folder / "out" / "results.json").read_text())["rows"])
    return 0


@contextlib.contextmanager
def running(process: subprocess.Popen) -> Iterator[None]:
    """Ends the process with the block, whatever ends that."""
    with process:
        try:
            yield
        finally:
            process.kill()


def test_a_planted_busy_process_marks_the_rows_that_it_disturbs(two_cores, command) -> None:
    quiet = Quiet()
    time.sleep(1.0)
    quiet.expect()
    process = command.start(
        "compare", *SMALL, "--device", "cpu", "--strategies", "single,zero0,zero1,ddp", "--num-steps", "20",
        "--output-dir", "out",
    )  # fmt: skip
    with running(process):
        until(process, lambda: row_num(command) == 1, else_="the first row did not come")
        quiet.expect()
        with running(subprocess.Popen([sys.executable, "-c", THIRD_OF_A_CORE])):
            until(process, lambda: row_num(command) == 3, else_="the third row did not come")
        quiet.expect()
        _, stderr = process.communicate(timeout=120)
    quiet.expect()
    rows = command.rows()
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok"), stderr
    assert {name: row["busy"] is not None for name, row in rows.items()} == {
        "single": False, "zero0": True, "zero1": True, "ddp": False,
    }  # fmt: skip
    assert "of 2 cores" in rows["zero0"]["busy"] and rows["zero0"]["relative"] is None
    assert min(rows[name]["relative"] for name in ("single", "ddp")) == 1.0
