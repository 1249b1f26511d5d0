"""Measurements that need a fresh process: a module of ours is run as one and answers in a line of JSON."""

from __future__ import annotations

import subprocess
import sys

from zerobench.errors import Error
from zerobench.host.processes import child_environment


def ask(module: str, *arguments: str, failure: str, answer_s: float) -> str:
    """The last line that it prints. Raises Error, ``failure`` and why, where it ends badly or takes longer."""
    try:
        asked = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, env=child_environment(), timeout=answer_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Error(f"{failure}: its process did not answer within {answer_s:g} s") from None
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise Error(f"{failure}: {last}")
    return asked.stdout.strip().splitlines()[-1]
