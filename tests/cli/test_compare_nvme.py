"""Optimizer state on NVMe in a comparison: the same result, what it moved, and nothing left on the disk."""

from __future__ import annotations

import json
import re

import pytest
from conftest import SMALL

from zerobench.io_settings import IoSettings, default_file, write_settings


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
