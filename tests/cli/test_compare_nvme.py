"""Optimizer state on NVMe in a comparison: the same result, what it moved, and nothing left on the disk."""

from __future__ import annotations

import json

import pytest
from conftest import SMALL


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
    text = json.dumps(swapped["nvme"])
    assert "nvme_written_bytes" in text
    assert "nvme" not in swapped["none"]["memory_bytes"]


def test_no_file_is_left(swapped, shared_command) -> None:
    assert list((shared_command.folder / "disk").iterdir()) == []
