"""Rows that offload, on GPUs, through the command: verified like every row, their memory by tier, limits of memory.

The first DeepSpeed row compiles its CPU Adam, a minute or two. Rows whose package or compiler is missing are skipped by
the command itself, and tests skip with its reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from comparisons import compare

pytestmark = pytest.mark.timeout(900)
SHAPE = (
    "--model", "tiny", "--num-layers", "4", "--hidden-size", "256", "--model-option", "num_heads=4",
    "--batch-size", "8", "--seq-length", "128", "--precision", "bf16", "--num-steps", "6", "--warmup-steps", "2",
    "--rounds", "0",
)  # fmt: skip
DEEPSPEED = ["deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3_super"]
PEERS = ["fsdp2", *DEEPSPEED]
RUNS = {
    "none": ["fsdp2", "deepspeed1", "deepspeed2", "deepspeed3"],
    "cpu_optimizer": DEEPSPEED,
    "cpu_full": ["fsdp2", "deepspeed3"],
}
NOT_HERE = (
    "is not installed",
    "there is no nvcc",
    "there is no ninja",
)  # of the machine, not of the settings

Rows = dict[tuple[str, str], dict[str, Any]]


def rows_of(folder: Path, *arguments: str) -> Rows:
    """Return the rows of a comparison by strategy and offload."""
    _, results = compare(folder, *SHAPE, *arguments, timeout_s=840)
    return {(row["strategy"], row["settings"]["offload"]): row for row in results["rows"]}


def ran(row: dict[str, Any]) -> dict[str, Any]:
    """A row that is right; skips where this machine lacks what it needs."""
    if row["status"] == "skipped" and any(text in row["error"] for text in NOT_HERE):
        pytest.skip(row["error"])
    assert row["status"] == "ok", row["error"]
    return row


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> Rows:
    folder = tmp_path_factory.mktemp("one")
    return rows_of(
        folder,
        "--world-size",
        "1",
        "--strategies",
        ",".join(PEERS),
        "--offload",
        "none,cpu_optimizer,cpu_full",
    )


@pytest.mark.parametrize("offload", RUNS)
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_trains_offloaded_or_says_why_not(one_gpu, name, offload) -> None:
    row = one_gpu[name, offload]
    if name not in RUNS[offload]:
        assert row["status"] == "skipped" and "--offload" in row["error"]
        return
    assert ran(row)["deviation"]["reference"] == "single"
    assert row["loss"][-1] > 0 and row["step_time_ms"]["median"] > 0


@pytest.mark.parametrize(
    ("name", "offload"),
    [(name, offload) for offload in ("cpu_optimizer", "cpu_full") for name in RUNS[offload]],
)
def test_offloaded_state_is_on_the_host(one_gpu, name, offload) -> None:
    row = ran(one_gpu[name, offload])
    count = row["settings"]["parameter_count"]
    host, device = row["memory_bytes"]["host"], row["memory_bytes"].get("device", {})
    for moments in ("exp_avg", "exp_avg_sq"):
        assert host[moments] == pytest.approx(4 * count, rel=0.02)
        assert not device.get(moments)
    if offload == "cpu_full":
        assert host["parameters"] >= 2 * count * 0.9
    plain = one_gpu[name, "none"] if name != "deepspeed3_super" else one_gpu["deepspeed3", "none"]
    # Of its device SuperOffload took 500 MB more than stage 3 without offload (one H200), for reasons not looked into.
    peak = "torch_allocated_peak_bytes" if name == "deepspeed3_super" else "peak_device_bytes"
    if plain["status"] == "ok":
        assert row[peak] < plain[peak]


def test_rows_say_what_offload_costs(one_gpu) -> None:
    row = ran(one_gpu["fsdp2", "cpu_full"])
    assert 0 < row["offload_practicality"] <= 1.5
    assert row["phases_ms"]["exposed_offload"] > 0
    assert set(row["transfers"]["limit_gb_s"]) == {"to_host", "to_device", "both_ways"}
    assert all(1 < limit < 1000 for limit in row["transfers"]["limit_gb_s"].values())
    assert one_gpu["fsdp2", "none"]["transfers"] is None


def test_clipping_and_accumulation(tmp_path) -> None:
    rows = rows_of(
        tmp_path, "--world-size", "1", "--strategies", "deepspeed2,deepspeed3,fsdp2",
        "--offload", "cpu_optimizer,cpu_full", "--clip", "0.5", "--grad-accum", "2", "--batch-size", "4",
    )  # fmt: skip
    ran(rows["fsdp2", "cpu_full"])
    for point in (
        ("deepspeed2", "cpu_optimizer"),
        ("deepspeed3", "cpu_optimizer"),
        ("deepspeed3", "cpu_full"),
    ):
        ran(rows[point])


def test_a_ratio_leaves_the_rest_on_the_gpu(tmp_path) -> None:
    rows = rows_of(
        tmp_path, "--world-size", "1", "--strategies", "deepspeed3,deepspeed3_super", "--offload", "cpu_optimizer",
        "--offload-ratio", "0.5",
    )  # fmt: skip
    for name in ("deepspeed3", "deepspeed3_super"):
        memory = ran(rows[name, "cpu_optimizer"])["memory_bytes"]
        assert memory["host"]["exp_avg"] > 0 and memory["device"]["exp_avg"] > 0


def test_state_on_nvme_comes_back_right_and_leaves_no_files(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    file = tmp_path / "several.json"  # several sub-groups, so that the next is read while one is updated
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 1_000_000}}))
    for number, rows_from in enumerate((["--strategies", "deepspeed3"], ["--config", str(file)])):
        folder = tmp_path / str(number)
        rows = rows_of(folder, "--world-size", "1", *rows_from, "--offload", "nvme", "--nvme-path", str(disk))
        row = ran(rows["deepspeed3", "nvme"])
        assert row["memory_bytes"]["nvme"]["exp_avg"] > 3 * row["settings"]["parameter_count"]
        assert list(disk.iterdir()) == []


def test_parameters_on_nvme_come_back_right_and_leave_no_files(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = rows_of(
        tmp_path, "--world-size", "1", "--strategies", "zero3,deepspeed3", "--hidden-size", "1024",
        "--offload", "nvme_full", "--nvme-path", str(disk),
    )  # fmt: skip
    assert list(disk.iterdir()) == []
    assert ran(rows["zero3", "nvme_full"])["status"] == "ok"
    row = ran(rows["deepspeed3", "nvme_full"])
    memory, count = row["memory_bytes"], row["settings"]["parameter_count"]
    # Those of less than a MiB stay on the host.
    assert 1.5 * count < memory["nvme"]["parameters"] < 2 * count
    assert memory["host"]["staging"] > 16 * 2 * 1024 * 4096


def test_our_rows_end_with_the_same_bits_and_count_what_they_move(tmp_path) -> None:
    rows = rows_of(
        tmp_path, "--world-size", "1", "--strategies", "zero2,zero3", "--offload", "none,cpu_optimizer",
        "--offload-ratio", "0.5", "--clip", "1.0",
    )  # fmt: skip
    assert len({ran(row)["checksum"] for row in rows.values()}) == 1
    for name in ("zero2", "zero3"):
        row = rows[name, "cpu_optimizer"]
        moved, host = row["transfers"], row["memory_bytes"]["host"]
        assert (
            moved["to_host_bytes"] == 2 * host["exp_avg"] // 4
        )  # gradients in bf16 of the half that is there
        assert 0.4 < moved["offload_ratio"] < 0.6
        assert {"to_host", "to_device"} <= moved["achieved_gb_s"].keys() & moved["limit_gb_s"].keys()
        assert moved["pinned_requested_bytes"] >= 3 * host["exp_avg"]
        assert row["phases_ms"]["exposed_offload"] >= 0


def test_two_gpus(tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    rows = rows_of(
        tmp_path, "--world-size", "2", "--strategies", ",".join(PEERS), "--offload", "cpu_optimizer,cpu_full",
        "--clip", "1.0",
    )  # fmt: skip
    for offload in ("cpu_optimizer", "cpu_full"):
        for name in RUNS[offload]:
            ran(rows[name, offload])


def test_a_limit_of_device_memory_is_as_a_smaller_gpu(tmp_path) -> None:
    large = ["--batch-size", "128", "--seq-length", "256"]
    limited = ["--world-size", "1", "--strategies", "ddp,zero0,zero3", "--device-memory-gib", "0.15"]
    rows = rows_of(tmp_path, *large, *limited)
    for name in ("ddp", "zero0", "zero3"):
        row = rows[name, "none"]
        assert (row["status"], row["oom_tier"]) == ("oom", "device"), (name, row["error"])
    roomy = tmp_path / "roomy"
    rows = rows_of(roomy, "--world-size", "1", "--strategies", "zero0", "--device-memory-gib", "8")
    row = ran(rows["zero0", "none"])
    assert row["settings"]["device_memory_gib"] == 8


def test_ranks_are_bound_to_the_node_of_their_gpu(tmp_path) -> None:
    rows = rows_of(tmp_path, "--world-size", "1", "--strategies", "zero1", "--bind", "numa")
    row = rows["zero1", "none"]
    if row["status"] != "ok":
        assert "--bind numa" in row["error"]
        pytest.skip(row["error"])
    assert len(row["binding"]) == 1 and row["binding"][0].startswith("node ")
