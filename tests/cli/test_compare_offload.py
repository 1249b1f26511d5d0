"""Offload as a dimension of the grid, limits of memory, ranks bound to nodes: what runs, what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import SMALL


@pytest.fixture(scope="module")
def placed(shared_command):
    bind = ["--bind", "numa"] if Path("/sys/devices/system/node/node0").exists() else []
    result = shared_command.run(
        "compare", *SMALL, "--strategies", "single,ddp,fsdp2,zero0,zero1,zero3",
        "--offload", "none,cpu_optimizer,cpu_full,nvme,nvme_full", "--nvme-path", ".", "--host-memory-gib", "1",
        "--precision", "bf16", *bind, "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads((shared_command.folder / "out" / "results.json").read_text())["rows"]
    return {(row["strategy"], row["settings"]["offload"]): row for row in rows}, result


def test_what_cannot_be_placed_is_skipped_with_the_reason(placed) -> None:
    rows, result = placed
    peers = {point: row["status"] for point, row in rows.items() if not point[0].startswith("zero")}
    ran = {("single", "none"), ("ddp", "none"), ("fsdp2", "none"), ("fsdp2", "cpu_full")}
    assert peers == {point: "ok" if point in ran else "skipped" for point in peers}
    assert len(peers) == 1 + 2 * 5
    assert rows["ddp", "cpu_full"]["error"] == "ddp keeps all of its state on its device"
    assert "use --offload cpu_full" in rows["fsdp2", "nvme"]["error"]
    assert "use --offload cpu_full" in result.stdout


def test_offloaded_state_is_on_the_host_and_right(placed) -> None:
    rows, _ = placed
    row, plain = rows["fsdp2", "cpu_full"], rows["fsdp2", "none"]
    assert row["name"] == "fsdp2_bf16_ranks2_bs2_sl32_offload-cpu_full"
    assert row["settings"]["host_memory_gib"] == 1 and plain["settings"]["host_memory_gib"] is None
    assert row["memory_bytes"]["host"] == plain["memory_bytes"]["device"]
    kept = {name: held for name, held in row["memory_bytes"]["host"].items() if name != "gradients"}
    assert row["peak_device_bytes"] == pytest.approx(
        plain["peak_device_bytes"] - sum(kept.values()), rel=1e-3
    )
    assert row["deviation"]["reference"] == "single"
    assert row["checksum"] == plain["checksum"]
    assert row["loss"] == plain["loss"]


def test_our_rows_offload_at_the_stages_that_shard_with_the_same_bits(placed) -> None:
    rows, _ = placed
    plain = rows["zero3", "none"]
    for point in (("zero1", "cpu_optimizer"), ("zero3", "cpu_optimizer"), ("zero3", "cpu_full")):
        row = rows[point]
        assert (row["status"], row["checksum"]) == ("ok", plain["checksum"]), row["error"]
        held, moved = row["memory_bytes"], row["transfers"]
        assert held["host"]["exp_avg"] > 0 and not held["device"].get("exp_avg")
        numel = held["host"]["exp_avg"] // 4
        assert moved["to_host_bytes"] == 2 * numel  # gradients in bf16, each once
        assert moved["to_device_bytes"] >= 2 * numel
        assert moved["offload_ratio"] == 1
        assert row["phases_ms"]["exposed_offload"] >= 0
    assert rows["zero3", "cpu_optimizer"]["offload_practicality"] > 0
    row = rows["zero3", "nvme_full"]
    assert (row["status"], row["checksum"]) == ("ok", plain["checksum"]), row["error"]
    assert not row["memory_bytes"]["device"].get("parameters")
    assert row["transfers"]["offload_ratio"] == 1
    for point in (("zero0", "cpu_optimizer"), ("zero1", "cpu_full"), ("zero1", "nvme_full")):
        assert rows[point]["status"] == "skipped" and "offload_" in rows[point]["error"]


def test_ranks_are_bound_and_the_row_says_where(placed) -> None:
    rows, _ = placed
    row = rows["fsdp2", "none"]
    if row["settings"]["bind"] == "none":
        pytest.skip("the kernel lists no NUMA nodes here")
    assert len(row["binding"]) == 2 and all(text.startswith("node ") for text in row["binding"])
    assert row["update_cpus"] is None  # not ours
    row = rows["zero3", "none"]
    for bound, updates in zip(row["binding"], row["update_cpus"], strict=True):
        assert f" {bound} (as configured)" in updates and "thread" in updates


def test_what_needs_more_than_the_device_limit_is_oom(command) -> None:
    result = command.run(
        "compare", "--num-layers", "2", "--hidden-size", "32", "--batch-size", "16", "--seq-length", "128",
        "--num-steps", "2", "--warmup-steps", "1", "--strategies", "single,zero0", "--device-memory-gib", "0.002",
        "--output-dir", "out",
    )  # fmt: skip
    rows = command.rows()
    assert {name: row["status"] for name, row in rows.items()} == {"single": "oom", "zero0": "oom"}, (
        result.stderr
    )
    assert " MiB of the device are needed and --device-memory-gib allows 2.05" in rows["zero0"]["error"]
    assert result.returncode == 1  # none is ok


def test_auto_fills_what_the_device_limit_leaves_and_the_row_says_how_much(command) -> None:
    asked = [
        "compare", "--num-layers", "4", "--hidden-size", "64", "--batch-size", "2", "--seq-length", "32",
        "--num-steps", "2", "--warmup-steps", "2", "--strategies", "zero2", "--offload", "cpu_optimizer",
    ]  # fmt: skip
    command.run(*asked, "--output-dir", "all")
    whole = command.rows("all")["zero2"]
    assert whole["status"] == "ok", whole["error"]
    state = sum(whole["memory_bytes"]["host"][kind] for kind in ("master", "exp_avg", "exp_avg_sq"))
    limit_gib = (whole["peak_device_bytes"] + 0.5 * state) / 0.98 / (1 << 30)
    result = command.run(
        *asked, "--offload-ratio", "auto", "--device-memory-gib", str(limit_gib), "--output-dir", "auto"
    )
    row = command.rows("auto")["zero2"]
    assert (row["status"], row["checksum"]) == ("ok", whole["checksum"]), row["error"]
    assert row["settings"]["offload_ratio"] == "auto"
    ratio, memory = row["transfers"]["offload_ratio"], row["memory_bytes"]
    assert 0.3 < ratio < 0.7
    assert memory["host"]["exp_avg"] < whole["memory_bytes"]["host"]["exp_avg"]
    assert whole["peak_device_bytes"] < row["peak_device_bytes"] <= limit_gib * (1 << 30)
    assert f"{ratio:.3g} (auto)" in result.stdout


def test_a_folder_that_takes_no_files_is_refused(command) -> None:
    result = command.run("compare", "--offload", "nvme", "--nvme-path", "/proc")
    assert result.returncode == 2 and "--nvme-path /proc" in result.stderr
