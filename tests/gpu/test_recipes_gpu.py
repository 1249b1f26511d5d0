"""A recipe on a GPU next to the study that published the same rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from comparisons import zerobench


@pytest.mark.timeout(420)
def test_rows_of_precision_stand_next_to_published_ones(tmp_path: Path) -> None:
    arguments = [
        "--references", "--world-size", "1", "--strategies", "zero0", "--precision", "fp16,fp32", "--repeats", "2",
        "--num-steps", "10", "--rounds", "0", "--output-dir", "out",
    ]  # fmt: skip
    result = zerobench(tmp_path, "recipe", "run", "precision", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = list(csv.DictReader((tmp_path / "out" / "references.csv").read_text("utf-8").splitlines()))
    ours = [line for line in lines if line["row"]]
    assert {line["id"] for line in ours} == {"h100nvl-fp16-zero0", "h100nvl-fp32-zero0"}
    assert len(ours) == 12 and all(float(line["ours"]) > 0 for line in ours)
    assert "Published figures, and ours" in result.stdout
