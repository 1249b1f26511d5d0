"""A stranger can follow the pages of start/ from top to bottom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import DOCS, run_page

START = DOCS / "start"
ROOT = DOCS.parent
HERE = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def test_the_training_loop_runs_as_written(tmp_path: Path) -> None:
    printed = run_page(START / "first-training-loop.md", tmp_path, HERE)
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 5 and losses[-1] < losses[0] / 10


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_pages_run_in_order_from_a_clean_clone(tmp_path: Path) -> None:
    """Needs a network: the first page installs torch."""
    clone = tmp_path / "zerobench"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    activate = clone / ".venv" / "bin"
    outside = {"PYTHONPATH": "", "VIRTUAL_ENV": ""}
    run_page(START / "install.md", clone, outside)
    work = tmp_path / "work"  # where the package is the installed one
    work.mkdir()
    inside = {**outside, "PATH": os.pathsep.join([str(activate), os.environ["PATH"]])}
    run_page(START / "first-comparison.md", work, inside)
    assert (work / "results" / "first" / "report.html").exists()
    run_page(START / "first-training-loop.md", work, inside)
