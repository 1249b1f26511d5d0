"""The notebooks run from top to bottom on result files."""

from __future__ import annotations

import ast
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
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SAMPLE = Path(__file__).parent / "golden" / "results_sample.json"


def cells(path: Path) -> list[Any]:
    return nbformat.read(path, as_version=4).cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_holds_no_output(path: Path) -> None:
    for cell in cells(path):
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_public_names_of_the_report_alone(path: Path) -> None:
    code = "\n".join(cell.source for cell in cells(path) if cell.cell_type == "code")
    nodes = list(ast.walk(ast.parse(code)))
    imported = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [ast.unparse(node) for node in imported if "zerobench" in ast.unparse(node)]
    used = [
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "report"
    ]
    assert ours == ["from zerobench import report"]
    assert used and set(used) <= set(zerobench.report.__all__)


@pytest.fixture
def outputs(tmp_path: Path) -> Callable[..., list[Any]]:
    """Return a function that executes a notebook as in a fresh clone, which has no results of its own."""

    def run(results: Path | None, notebook: str = "analysis") -> list[Any]:
        (tmp_path / "notebooks").mkdir()
        (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
        # The kernel finds the zerobench that is tested.
        package_home = str(Path(zerobench.report.__file__).parents[2])
        folders = filter(None, [package_home, os.environ.get("PYTHONPATH")])
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "IPYTHONDIR": str(tmp_path)}
        environ.pop("ZEROBENCH_RESULTS", None)
        if results is not None:
            environ["ZEROBENCH_RESULTS"] = str(results)
        found = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4)
        client = NotebookClient(
            found,
            timeout=120,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path / "notebooks")}},
        )
        client.execute(env=environ)
        shown = [output for cell in found.cells for output in cell.get("outputs", [])]
        assert not [output for output in shown if output.output_type == "error"]
        assert not [output.text for output in shown if output.get("name") == "stderr"]
        return shown

    return run


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's own libraries may warn
def test_notebook_runs(outputs: Callable[..., list[Any]]) -> None:
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
def test_without_results_a_shipped_one_is_opened(outputs: Callable[..., list[Any]]) -> None:
    shipped = read_results(ROOT / "benchmarks" / "results" / "cpu-grid-1")
    assert table_text(shipped, width=110) in printed(outputs(None))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_second_notebook_ends_with_a_launch_line(outputs: Callable[..., list[Any]]) -> None:
    found = outputs(None, notebook="decision")
    text = printed(found)
    assert "2 of 2 runs" in text and "a step of zero1 takes" in text
    assert "no regression above 5 % found" in text
    assert text.rstrip().endswith("train.py") and "torchrun" in text
    assert len([output for output in found if "image/png" in output.get("data", {})]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_notebook_compares_what_does_the_same_work(outputs: Callable[..., list[Any]], tmp_path: Path) -> None:
    results = sample()
    for row in sample().rows:
        if row.strategy in ("zero1", "zero3"):
            row.settings.grad_accum, row.name = 4, f"{row.name}_ga4"
            results.rows.append(row)
    finish_rows(results)
    (tmp_path / "grid.json").write_text(results.model_dump_json())
    text = printed(outputs(tmp_path / "grid.json"))
    assert "zero1, accum 1 / zero2: " in text and "accum 4" in text
    assert not re.search(r"accum 1 / .*accum 4:|accum 4 / .*accum 1:", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_notebook_runs_without_an_ok_row(outputs: Callable[..., list[Any]], tmp_path: Path) -> None:
    results = sample()
    for row in results.rows:
        row.status, row.step_time_ms, row.loss, row.memory_bytes = "failed", None, None, None
    finish_rows(results)
    (tmp_path / "failed.json").write_text(results.model_dump_json())
    assert "Nothing to recommend" in printed(outputs(tmp_path / "failed.json"))
