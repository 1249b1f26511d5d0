"""Calls of Python by tests/gpu/run.sh: a stand-in for python3 writes down its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "gpu/run.sh"
ASKED = '#!/bin/sh\necho "$@" >> "$ASKED"\n'


@pytest.fixture
def asked(tmp_path):
    """Runs the script for one test file; the arguments of each call of python3."""

    def run(**environment: str) -> list[str]:
        python = tmp_path / "bin/python3"
        python.parent.mkdir()
        python.write_text(ASKED)
        python.chmod(0o755)
        path = f"{python.parent}:{os.environ['PATH']}"
        subprocess.run(
            [RUN, tmp_path / "out", "tests/gpu/test_kernels.py"],
            env={"PATH": path, "ASKED": str(tmp_path / "asked"), **environment},
            check=True,
            timeout=60,
        )
        return (tmp_path / "asked").read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("environment", "build"),
    [
        ({}, ["-m pip install .[test]"]),
        ({"ZEROBENCH_NO_ISOLATION": "1"}, ["-m pip install --no-build-isolation .[test]"]),
        ({"ZEROBENCH_NO_BUILD": "1"}, []),
    ],
)
def test_the_build_is_isolated_unless_told_otherwise(asked, environment, build):
    *built, tested = asked(**environment)
    assert built == build
    assert tested == "-m pytest -n 0 -q -p no:cacheprovider tests/gpu/test_kernels.py"
