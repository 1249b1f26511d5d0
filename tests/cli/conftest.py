"""Runs the command in a process of its own and looks for what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
SMALL = [
    "--num-layers", "2", "--hidden-size", "32", "--batch-size", "2", "--seq-length", "32", "--num-steps", "2",
    "--warmup-steps", "1", "--rounds", "0",
]  # fmt: skip


# A shell's background jobs ignore Ctrl-C and pass that on to all that they start; the commands tested here must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass
class Command:
    """``zerobench`` with a mark in its environment, by which its processes are known."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self) -> dict[str, str]:
        paths = [str(TESTS), str(TESTS / "cli"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "ZEROBENCH_TEST_MARK": self.mark,
            "XDG_CONFIG_HOME": str(self.folder / "config"),  # what `tune io` found is the user's
            "COLUMNS": "200",
        }

    def start(self, *arguments: str, launcher: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "zerobench", *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(
        self, *arguments: str, timeout_s: float = 240, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def rows(self, output: str = "out") -> dict[str, dict[str, Any]]:
        """Return rows by strategy, without the module of those that have one."""
        results = json.loads((self.folder / output / "results.json").read_text())
        return {row["strategy"].rpartition(":")[2]: row for row in results["rows"]}

    def processes(self) -> list[str]:
        """Command lines of living processes that carry the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"ZEROBENCH_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # it ended meanwhile
        return found

    def leaves_nothing(self, *, within_s: float = 10) -> bool:
        deadline = time.monotonic() + within_s
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def until(
    process: subprocess.Popen[str], condition: Callable[[], Any], *, else_: str, within_s: float = 120
) -> None:
    """Waits for ``condition``; fails where the process or the time ends before."""
    deadline = time.monotonic() + within_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(else_)
        time.sleep(0.02)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    yield Command(tmp_path)


@pytest.fixture(scope="module")
def shared_command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("shared"))
