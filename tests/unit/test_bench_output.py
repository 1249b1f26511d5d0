"""Files of micro-benchmarks: whole or not at all, of the machine as it was before, and rows that differ."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zerobench.errors import Error
from zerobench.host.gpus import Gpu
from zerobench.micro import link, pinned_ready
from zerobench.micro.output import (
    MicroReport,
    OutputFile,
    TextTable,
    csv_text,
    print_table,
    ratio_cell,
    ratio_json,
)
from zerobench.results.stats import Ratio

ROW = {"gpus": [0, 1], "samples_us": {"ours": {"median": 2.0, "samples": [1.0, 2.0, 3.0], "outliers": [2]}}}


def report(*rows: dict[str, Any]) -> MicroReport:
    return MicroReport(
        benchmark="pinned", machine="a machine", settings={}, rows=list(rows), tables=[], notes="notes"
    )


@pytest.mark.parametrize("name", ["found.json", "found.csv", "found.md"])
def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / f".{name}.partial").symlink_to("/dev/full")
    with (
        pytest.raises(Error, match=rf"{name} cannot be written \(No space left"),
        OutputFile(tmp_path / name) as file,
    ):
        file.write(report(ROW))
    assert list(tmp_path.iterdir()) == []


def test_results_are_there_and_nothing_beside_them(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "found.json") as file:
        file.write(report(ROW))
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == [ROW]


def test_printed_results_are_one_document_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with OutputFile(None, printed=True) as file:
        file.write(report({**ROW, "wrong": 2}, {**ROW, "wrong": 0}))
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "pinned: 2 rows measured, 1 of them wrong"
    assert [row["wrong"] for row in document["rows"]] == [2, 0]


def test_a_file_that_is_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "found.json"):
        (tmp_path / "found.json").unlink()


def test_facts_are_those_from_before_the_run(tmp_path: Path) -> None:
    loads = iter([0.5, 7.0])

    def facts(gpus: Sequence[Gpu] = ()) -> dict[str, Any]:
        return {"cores": 2, "details": {"load_average": [next(loads)]}}

    with OutputFile(tmp_path / "found.json", facts=facts) as file:
        file.write(report(ROW))
    machine = json.loads((tmp_path / "found.json").read_text())["machine"]
    assert machine == {"cores": 2, "details": {"load_average": [0.5]}}


def test_rows_of_a_csv_tell_gpus_apart_and_leave_out_samples() -> None:
    rows = csv.DictReader(io.StringIO(csv_text(report(ROW, {**ROW, "gpus": [1]}))))
    assert list(rows) == [
        {"gpus": "0,1", "samples_us.ours.median": "2.0"},
        {"gpus": "1", "samples_us.ours.median": "2.0"},
    ]


def test_a_ratio_without_an_interval_has_no_brackets() -> None:
    assert ratio_cell(Ratio(1.5, None, None)) == "1.50"
    assert ratio_cell(Ratio(1.5, 1.0, 2.0)) == "1.50 [1.00, 2.00]"
    assert ratio_json(Ratio(1.5, None, None)) == {"value": 1.5, "low": None, "high": None}


def test_figures_are_whole_on_a_narrow_terminal_and_columns_without_any_are_left_out() -> None:
    table = TextTable(title="Adam", columns=("dtypes", "vs torch long", "vs deepspeed", "wrong"))
    table.sections.append([("fp32 / none", "5.44 [2.19, 13.15]", "n/a", "0"), ("", "n/a", "n/a", "10")])
    text = io.StringIO()
    print_table(Console(file=text, width=20), table)
    _, header, *lines = (line.split("  ") for line in text.getvalue().splitlines() if line.strip())
    assert [cell.strip() for cell in header if cell.strip()] == ["dtypes", "vs torch long", "wrong"]
    assert "5.44 [2.19, 13.15]" in [cell.strip() for cell in lines[1]]
    assert "deepspeed" not in text.getvalue() and "…" not in text.getvalue()


def test_a_process_that_does_not_answer_is_named_with_its_time() -> None:
    order = pinned_ready.Order(side=pinned_ready.TOUCH, size_bytes=4096, gpu=None, threads=1)
    with pytest.raises(Error, match=r"one thread could not make 4096 bytes .* did not answer within 0\.01 s"):
        pinned_ready.measure_ready(order, answer_s=0.01)
    with pytest.raises(Error, match=r"the link between two GPUs .* did not answer within 0\.01 s"):
        link.measure_link(answer_s=0.01)
