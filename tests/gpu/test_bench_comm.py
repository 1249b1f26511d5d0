"""`bench comm` on GPUs, at sizes that take a moment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs 2 GPUs, and this machine has one", allow_module_level=True)


@pytest.mark.parametrize(
    "switches", [[], ["--symmetric"], ["--communicator", "peer"]], ids=["plain", "symmetric", "peer"]
)
def test_comm_measures_ours_beside_torch_and_the_link(tmp_path, switches: list[str]) -> None:
    file = tmp_path / "comm.json"
    arguments = ["--world-size", "2", "--max-bytes", str(1 << 20), "--repeats", "6", "--output", str(file)]
    result = subprocess.run(
        [sys.executable, "-m", "zerobench", "bench", "comm", *arguments, *switches],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(file.read_text())
    assert len(content["machine"]["gpus"]) >= 2
    assert content["settings"]["symmetric"] == ("--symmetric" in switches)
    assert content["settings"]["communicator"] == ("peer" if "peer" in switches else "nccl")
    rows = content["rows"]
    assert {row["communicator"] for row in rows} == {
        "peer" if "peer" in switches else "nccl, symmetric" if switches else "nccl"
    }
    # 64 KiB, 256 KiB and 1 MiB of each.
    assert [row["collective"] for row in rows] == [
        name for name in ("all_gather", "reduce_scatter", "all_reduce") for _ in range(3)
    ]
    for row in rows:
        assert row["wrong"] == row["wrong_torch"] == 0
        assert set(row["samples_us"]) == {"zerobench", "torch"}
        assert row["busbw_of_link"] == pytest.approx(row["busbw_gb_s"] / row["link_gb_s"])
        assert row["ratio_to_torch"]["low"] <= row["ratio_to_torch"]["value"] <= row["ratio_to_torch"]["high"]
