"""Pages of how-to/ are short, and their Python runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import DOCS, blocks

PAGES = sorted((DOCS / "how-to").glob("*.md"))
SAMPLE = Path(__file__).parents[1] / "unit" / "golden" / "results_sample.json"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_at_most_60_lines_and_a_block(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert "\n```" in text


def test_python_of_all_pages_runs(tmp_path: Path) -> None:
    """In one process, which imports torch once: each block with names of its own, as a file in one folder."""
    (tmp_path / "results" / "first").mkdir(parents=True)
    shutil.copy(SAMPLE, tmp_path / "results" / "first" / "results.json")
    names = []
    for page in PAGES:
        for number, block in enumerate(block for block in blocks(page) if block.language == "python"):
            names.append(f"{page.stem.replace('-', '_')}_{number}.py")
            (tmp_path / names[-1]).write_text(block.code)
    assert len(names) >= 8
    runner = (
        "import runpy, sys\nfor name in sys.argv[1:]:\n    print(name, flush=True)\n    runpy.run_path(name)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", runner, *names], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
