"""`bench adam` on a GPU at sizes that take a moment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

BYTES_PER_ELEMENT = {"fp32 / none": 28, "fp32 / bf16": 30, "bf16 / bf16": 28, "bf16 / bf16, remainders": 26}
SIZES = ["--min-numel", "1000", "--max-numel", "70001", "--repeats", "6"]


def test_adam_is_measured_beside_torch_and_a_copy(tmp_path) -> None:
    path = tmp_path / "adam.json"
    command = [sys.executable, "-m", "zerobench", "bench", "adam", *SIZES, "--output", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert torch.cuda.get_device_name(0) in run.stdout
    content = json.loads(path.read_text())
    assert content["benchmark"] == "adam" and content["settings"]["device"] == "cuda"
    rows = content["rows"]
    assert [row["numel"] for row in rows[::4]] == [1000, 4000, 16000, 64000, 70001]
    for row in rows:
        assert row["wrong"] == 0
        assert row["bytes_per_step"] == BYTES_PER_ELEMENT[row["dtypes"]] * row["numel"]
        assert {name: len(side["samples"]) for name, side in row["samples_us"].items()} == {
            "adam": 6,
            "torch": 6,
            "copy": 6,
        }
        assert row["gb_s"]["adam"] == pytest.approx(row["bytes_per_step"] / row["time_ms"]["adam"] / 1e6)
        assert row["ratio_to_copy"]["low"] <= row["ratio_to_copy"]["value"] <= row["ratio_to_copy"]["high"]


def test_threads_are_about_cpus() -> None:
    command = [sys.executable, "-m", "zerobench", "bench", "adam", "--threads", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2 and "--threads" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
