"""The notebook runs from top to bottom on a result file."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import zerobench.report
from zerobench.report import read_results, table_text

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "analysis.ipynb"
SAMPLE = Path(__file__).parent / "golden" / "results_sample.json"


def test_committed_notebook_holds_no_output() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.filterwarnings("default")  # the kernel's own libraries may warn
def test_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package_home = str(
        Path(zerobench.report.__file__).parents[2]
    )  # the kernel finds the zerobench that is tested
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.setenv("ZEROBENCH_RESULTS", str(SAMPLE))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    text = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert table_text(read_results(SAMPLE), width=110) in text
    assert "zero2 and zero1 tie as the fastest" in text and "cannot be told apart" in text
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 5  # three standard plots, step times, losses
    tables = [output for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) == 2
