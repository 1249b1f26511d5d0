"""Comparisons that tests on GPUs run by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SMALL = (
    "--model", "tiny", "--num-layers", "2", "--batch-size", "8", "--seq-length", "128", "--precision", "bf16",
    "--rounds", "0",
)  # fmt: skip


def compare(
    folder: Path, *arguments: str, timeout_s: float = 400
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run `compare` in ``folder`` (made if missing) and return how it ended, and the results in ``folder / "out"``."""
    result = zerobench(folder, "compare", *arguments, "--output-dir", "out", timeout_s=timeout_s)
    assert "Traceback" not in result.stdout + result.stderr
    assert (folder / "out" / "results.json").exists(), result.stderr
    return result, json.loads((folder / "out" / "results.json").read_text())


def zerobench(folder: Path, *arguments: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder`` (made if missing), with the modules of the tests on its path."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(TESTS), str(TESTS / "cli"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "zerobench", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "220"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
