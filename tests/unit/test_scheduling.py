"""Which tests run, and which side by side: small runs of pytest with the conftest.py of all tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parents[1] / "conftest.py"
ON_GPUS = ("a", "b", "c", "d")
ELSEWHERE = ("e", "f", "g", "h")
STARTS_RANKS = r"\branks\.(run|Group)\(|\bmp\.spawn\(|forkserver"
MARKS = {"g": "@pytest.mark.slow", "h": "@pytest.mark.long"}
TELLS_ITS_WORKER = """
import os, pathlib, pytest
{mark}
def test_one():
    pathlib.Path(__file__).with_suffix(".worker").write_text(os.environ.get("PYTEST_XDIST_WORKER", "alone"))
"""


@pytest.fixture
def workers(tmp_path):
    """Runs pytest with some options; each file's worker by its name."""

    def run(*options: str, passed: int = 8) -> dict[str, str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = quick\n    slow\n    long\n")
        (tmp_path / "tests").mkdir()
        shutil.copy(CONFTEST, tmp_path / "tests")
        for folder, names in (("gpu", ON_GPUS), ("unit", ELSEWHERE)):
            (tmp_path / "tests" / folder).mkdir()
            for name in names:
                mark = MARKS.get(name, "")
                (tmp_path / "tests" / folder / f"test_{name}.py").write_text(
                    TELLS_ITS_WORKER.format(mark=mark)
                )
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, "tests"],
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and f"{passed} passed" in done.stdout, done.stdout + done.stderr
        return {path.stem[-1]: path.read_text() for path in tmp_path.rglob("*.worker")}

    return run


def test_one_worker_runs_all_files_of_gpus(workers):
    found = workers("-n", "3", "--dist=loadfile")
    assert len({found[name] for name in ON_GPUS}) == 1
    assert len({found[name] for name in ELSEWHERE}) > 1


def test_other_distributions_stay_as_they_are(workers):
    found = workers("-n", "3", "--dist=loadscope")
    assert len({found[name] for name in ON_GPUS}) > 1


@pytest.mark.parametrize("options", [("-n", "0", "--dist=loadfile"), ("-p", "no:xdist")])
def test_without_workers_nothing_is_distributed(workers, options):
    assert set(workers(*options).values()) == {"alone"}


def test_quick_tests_are_those_of_units_without_another_mark(workers):
    assert set(workers("-n", "0", "-m", "quick", passed=2)) == {"e", "f"}


def test_no_quick_test_starts_ranks():
    starts = [
        path for path in Path(__file__).parent.glob("test_*.py") if re.search(STARTS_RANKS, path.read_text())
    ]
    assert [
        path.name for path in starts if not re.search(r"^pytestmark.*slow", path.read_text(), re.MULTILINE)
    ] == []
