"""The notebook runs from top to bottom on a result file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from report_samples import sample

import zerobench.report
from zerobench.report import finish_rows, read_results, table_text

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "analysis.ipynb"
SAMPLE = Path(__file__).parent / "golden" / "results_sample.json"


def test_committed_notebook_holds_no_output() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.fixture
def outputs(tmp_path: Path) -> Callable[[Path], list[Any]]:
    def run(results: Path) -> list[Any]:
        # The kernel finds the zerobench that is tested.
        package_home = str(Path(zerobench.report.__file__).parents[2])
        folders = filter(None, [package_home, os.environ.get("PYTHONPATH")])
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "ZEROBENCH_RESULTS": str(results),
            "IPYTHONDIR": str(tmp_path),
        }
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        )
        client.execute(env=environ)
        found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert not [output for output in found if output.output_type == "error"]
        assert not [output.text for output in found if output.get("name") == "stderr"]
        return found

    return run


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's own libraries may warn
def test_notebook_runs(outputs: Callable[[Path], list[Any]]) -> None:
    found = outputs(SAMPLE)
    text = printed(found)
    assert table_text(read_results(SAMPLE), width=110) in text
    assert "zero2 and zero1 tie as the fastest" in text and "cannot be told apart" in text
    images = [output for output in found if "image/png" in output.get("data", {})]
    assert len(images) == 5  # three standard plots, step times, losses
    tables = [output for output in found if "text/html" in output.get("data", {})]
    assert len(tables) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_notebook_compares_what_does_the_same_work(
    outputs: Callable[[Path], list[Any]], tmp_path: Path
) -> None:
    results = sample()
    for row in sample().rows:
        if row.strategy in ("zero1", "zero3"):
            row.settings.grad_accum, row.name = 4, f"{row.name}_ga4"
            results.rows.append(row)
    finish_rows(results)
    (tmp_path / "grid.json").write_text(results.model_dump_json())
    text = printed(outputs(tmp_path / "grid.json"))
    assert "zero1, accum 1 / zero2, accum 1: " in text and "accum 4" in text
    assert not re.search(r"accum 1 / .*accum 4:|accum 4 / .*accum 1:", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_notebook_runs_without_an_ok_row(outputs: Callable[[Path], list[Any]], tmp_path: Path) -> None:
    results = sample()
    for row in results.rows:
        row.status, row.step_time_ms, row.loss, row.memory_bytes = "failed", None, None, None
    finish_rows(results)
    (tmp_path / "failed.json").write_text(results.model_dump_json())
    assert "Nothing to recommend" in printed(outputs(tmp_path / "failed.json"))
