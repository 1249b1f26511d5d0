"""Optimizer state on NVMe in a comparison: the same result, what it moved, and nothing left on the disk."""

from __future__ import annotations

import ctypes
import json
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from conftest import SMALL

from zerobench import _native
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.swap.plan import swap_of
from zerobench.host.io_settings import IoSettings, default_file, write_settings


@pytest.fixture(scope="module")
def swapped(shared_command):
    (shared_command.folder / "disk").mkdir()
    result = shared_command.run(
        "compare", *SMALL, "--strategies", "zero2", "--offload", "none,nvme", "--nvme-path", "disk",
        "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((shared_command.folder / "out" / "results.json").read_text())["rows"]
    return {row["settings"]["offload"]: row for row in rows}


def test_state_on_disk_changes_no_result(swapped) -> None:
    assert {row["status"] for row in swapped.values()} == {"ok"}
    assert swapped["nvme"]["checksum"] == swapped["none"]["checksum"]
    assert swapped["nvme"]["loss"] == swapped["none"]["loss"]


def test_the_row_shows_what_was_moved_and_where_state_lies(swapped) -> None:
    moved = swapped["nvme"]["transfers"]
    assert re.match(r"\w+, blocks of \d+ KiB, depth \d+", moved["io_engine"])
    assert moved["chunk_numel"] == 4 << 20
    assert {"nvme_read_bytes", "nvme_written_bytes"} <= moved.keys()
    assert moved["limit_gb_s"].keys() == {"nvme_read", "nvme_write", "nvme_both"}
    # Outgoing buffers, frames and the whole begin on pages.
    assert moved["pinned_bytes"] - 5 * 4096 < moved["pinned_requested_bytes"] <= moved["pinned_bytes"]
    assert moved["pinned_requested_bytes"] == sum(swapped["nvme"]["memory_bytes"]["host"].values())
    assert {"exposed_offload", "exposed_io"} <= swapped["nvme"]["phases_ms"].keys()
    assert swapped["nvme"]["peak_host_bytes"] > 0 and swapped["nvme"]["offload_practicality"] > 0
    assert "nvme" not in swapped["none"]["memory_bytes"]


def test_tuned_settings_are_used_and_named(command, monkeypatch) -> None:
    (command.folder / "disk").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(command.folder / "config"))
    found = IoSettings(
        engine="threads", block_bytes=4 << 20, depth=4, tuned="2026",
        read_bytes_per_s=9e9, write_bytes_per_s=9e9, both_bytes_per_s=9e9,
    )  # fmt: skip
    write_settings(command.folder / "disk", found, file=default_file())
    result = command.run(
        "compare", *SMALL, "--strategies", "zero2", "--offload", "nvme", "--nvme-path", "disk",
        "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = command.rows().values()
    used = "threads, blocks of 4096 KiB, depth 4, tuned"
    assert row["transfers"]["io_engine"] == used
    assert (
        f"{command.folder / 'disk'}: state is swapped with {used} (settings of {default_file()})"
        in " ".join(result.stderr.split())
    )


PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14


def locking(limit_bytes: int) -> Callable[[], None]:
    """For a child before it becomes a program, which then may lock so much and no more, as root too."""
    libc = ctypes.CDLL(None)

    def limit() -> None:
        libc.prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)  # fails where it is not held anyway
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))

    return limit


@pytest.fixture
def needs_limits() -> None:
    status = subprocess.run(
        ["cat", "/proc/self/status"], capture_output=True, text=True, check=True, preexec_fn=locking(65536)
    ).stdout
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    if effective & 1 << CAP_IPC_LOCK:
        pytest.skip("CAP_IPC_LOCK cannot be dropped here, so no limit holds")
    if refusal := _native.load().io_uring_refusal():
        pytest.skip(f"io_uring is not usable here: {refusal}")


@pytest.mark.usefixtures("needs_limits")
def test_a_limit_of_locked_memory_keeps_its_rows_from_starting_and_no_others(command) -> None:
    (command.folder / "disk").mkdir()

    def compare(offloads: str, limit_bytes: int, *more: str) -> dict[str, dict[str, Any]]:
        result = command.run(
            "compare", *SMALL, "--strategies", "zero3", "--offload", offloads, "--nvme-path", "disk",
            "--output-dir", "out", *more, preexec_fn=locking(limit_bytes),
        )  # fmt: skip
        assert result.returncode == (0 if "none" in offloads else 1), result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        rows = json.loads((command.folder / "out" / "results.json").read_text())["rows"]
        shutil.rmtree(command.folder / "out")
        return {row["settings"]["offload"]: row for row in rows}

    rows = compare("none,cpu_optimizer,nvme", 65536)
    assert {name: row["status"] for name, row in rows.items()} == {
        "none": "ok",
        "cpu_optimizer": "ok",
        "nvme": "oom",
    }
    assert rows["nvme"]["oom_tier"] == "host"
    text = r"io_uring locks about \d+ MiB of buffers and RLIMIT_MEMLOCK leaves 0, \d+ too few: raise it .*threads"
    assert re.match(text, rows["nvme"]["error"])
    assert compare("nvme", 65536)["nvme"]["status"] == "oom"
    assert compare("none,nvme", 65536, "--io-engine", "threads")["nvme"]["status"] == "ok"


@pytest.mark.usefixtures("needs_limits")
@pytest.mark.parametrize("offload", ["nvme", "nvme_full"])
def test_what_a_limit_of_locked_memory_lets_start_can_run(command, offload) -> None:
    """Pools of more than 2 MiB lie in huge pages, which are charged whole."""
    (command.folder / "disk").mkdir()
    wider = [*SMALL, "--hidden-size", "96"]
    plan = make_plan(
        CompareOptions(
            device="cpu", model=("tiny",), num_layers=(2,), hidden_size=(96,), strategies=("zero3",),
            offload=(offload,), nvme_paths=(command.folder / "disk",), world_size=(2,), seq_length=(32,),
        )
    )  # fmt: skip
    swap = swap_of(plan.configurations[0])
    assert swap is not None and swap.locked_bytes > 4 << 20
    for limit_bytes, status in ((swap.locked_bytes - 4096, "oom"), (swap.locked_bytes, "ok")):
        command.run(
            "compare", *wider, "--strategies", "zero3", "--offload", offload, "--nvme-path", "disk",
            "--world-size", "2", "--output-dir", status, preexec_fn=locking(int(limit_bytes)),
        )  # fmt: skip
        (row,) = json.loads((command.folder / status / "results.json").read_text())["rows"]
        assert row["status"] == status, row["error"]


def test_a_disk_that_is_full_on_one_rank_ends_its_row_alone(command) -> None:
    (command.folder / "disk").mkdir()
    result = command.run(
        "compare", *SMALL, "--strategies", "troubles:FullAtStart,troubles:FullInASwap,troubles:Swaps",
        "--offload", "nvme", "--nvme-path", "disk", "--timeout", "60", "--output-dir", "out",
    )  # fmt: skip
    assert "Traceback" not in result.stderr + result.stdout
    rows = command.rows()
    assert {name: row["status"] for name, row in rows.items()} == {
        "FullAtStart": "failed",
        "FullInASwap": "failed",
        "Swaps": "ok",
    }, result.stdout + result.stderr
    for name in ("FullAtStart", "FullInASwap"):
        error = rows[name]["error"]
        assert error.startswith("rank 1: OSError: ") and str(command.folder / "disk") in error, error
        assert "ulimit -f" in error
    assert rows["Swaps"]["transfers"]["nvme_written_bytes"] > 0
    assert list((command.folder / "disk").iterdir()) == []
    assert command.leaves_nothing()


def test_no_file_is_left(swapped, shared_command) -> None:
    assert list((shared_command.folder / "disk").iterdir()) == []
