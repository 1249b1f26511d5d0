"""Peers beside each other on CPU ranks: honest rows are ok, and tightly."""

from __future__ import annotations

import importlib.util

import pytest
from conftest import SMALL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install '.[deepspeed]'",
)
PEERS = ["DeepSpeed0", "DeepSpeed1", "DeepSpeed2", "DeepSpeed3", "DeepSpeed3Leaves", "FSDP1"]


# Three ranks divide few sizes, so peers pad. At a low rate, masters that began rounded would be far off.
@pytest.mark.parametrize(
    ("world_size", "precision", "peers", "further"),
    [
        (3, "fp32", PEERS, ("--checkpointing",)),
        (3, "bf16", PEERS, ("--lr", "1e-5")),
        (3, "fp16", PEERS[1:5], ("--grad-accum", "2", "--clip", "0.5", "--warmup-steps", "8")),
        (1, "bf16", PEERS, ("--grad-accum", "2")),
        (1, "bf16", PEERS, ("--hidden-size", "256", "--lr", "0.01")),  # its loss rises first
    ],
)
def test_honest_peers_are_ok(command, monkeypatch, world_size, precision, peers, further) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    result = command.run(
        "compare", *SMALL, "--world-size", str(world_size), "--precision", precision, *further, "--output-dir", "out",
        "--strategies", ",".join(["zero3", *(f"peers_on_cpu:{name}" for name in peers)]),
    )  # fmt: skip
    rows = command.rows()
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(["zero3", *peers], "ok"), (
        result.stdout + result.stderr
    )
    for name, row in rows.items():
        found = row["deviation"]
        assert (found["reads"], found["evaluation"]) == (0.0, 0.0), name
        assert found["optimizer"] < 1e-5, (name, found["optimizer_worst"])
        assert found["update"] < (1e-4 if precision == "fp32" else 0.05), (name, found["update"])
    assert command.leaves_nothing()
