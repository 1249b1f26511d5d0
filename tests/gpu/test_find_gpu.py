"""`compare --find` on a GPU: the batch that it names runs in fresh processes, and the next one is out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from comparisons import compare

pytestmark = pytest.mark.timeout(900)
SHAPE = (
    "--model", "tiny", "--num-layers", "4", "--hidden-size", "256", "--seq-length", "256", "--precision", "bf16",
    "--world-size", "1", "--num-steps", "5", "--warmup-steps", "2", "--rounds", "0", "--strategies", "zero3",
)  # fmt: skip


def rows_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    return compare(folder, *SHAPE, *arguments, timeout_s=600)[1]["rows"]


@pytest.mark.parametrize("limit", [["--device-memory-gib", "0.5"], ["--memory-limit", "0.5"]])
def test_the_batch_that_is_found_fits_and_the_next_one_does_not(tmp_path, limit: list[str]) -> None:
    (row,) = rows_of(tmp_path / "found", *limit, "--find", "batch", "--batch-size", "8")
    assert row["status"] == "ok", row["error"]
    search = row["search"]
    assert row["settings"]["batch_size"] == search["largest"] == search["too_large"] - 1
    sizes = f"{search['largest']},{search['too_large']}"
    for number in range(3):
        fits, too_large = rows_of(tmp_path / str(number), *limit, "--batch-size", sizes)
        assert fits["status"] == "ok" and fits["verdict"] != "does not fit", fits["error"]
        assert too_large["verdict"] == "does not fit"
        assert too_large["status"] == ("oom" if "--device-memory-gib" in limit else "ok")
