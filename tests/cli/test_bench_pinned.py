"""`bench pinned` on a machine without a GPU, at sizes that take a moment."""

from __future__ import annotations

import json
import os

import pytest

SMALL = [
    "bench",
    "pinned",
    "--device",
    "cpu",
    "--copy-bytes",
    "1000003",
    "--repeats",
    "6",
    "--ready-repeats",
    "6",
]


def test_pinned_measures_what_there_is_and_says_what_it_leaves_out(command) -> None:
    result = command.run(*SMALL, "--ready-gib", "0.01", "--output", "pinned.json")
    assert result.returncode == 0, result.stderr
    assert "without a GPU nothing is registered" in result.stdout
    content = json.loads((command.folder / "pinned.json").read_text())
    assert content["benchmark"] == "pinned" and content["settings"]["device"] == "cpu"
    ready, copies = content["rows"]
    assert ready["size_bytes"] == round(0.01 * 2**30)
    assert ready["size_bytes"] <= ready["mapped_bytes"] < 1.01 * ready["size_bytes"]
    assert 0 <= ready["huge_bytes"] <= ready["mapped_bytes"]
    assert ready["register_s"] == 0 and 0 < ready["fill_s"] <= ready["time_s"]["zerobench"]
    assert {side: len(one["samples"]) for side, one in ready["samples_us"].items()} == {
        "zerobench": 6,
        "one thread": 6,
    }
    assert copies["direction"] == "within the host" and copies["gpus"] == []
    for side in ("zerobench", "torch"):
        assert copies["gb_s"][side] == pytest.approx(1000003 / copies["time_ms"][side] / 1e6)
    assert command.leaves_nothing()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ready-gib", "1000000"),
        ("--ready-gib", "nan"),
        ("--ready-gib", "inf"),
        ("--ready-gib", "1e300"),
        ("--ready-repeats", "5"),
        ("--repeats", "1"),
        ("--threads", "9999"),
        ("--copy-bytes", "0"),
    ],
)
def test_pinned_refuses_what_cannot_be(command, option: str, value: str) -> None:
    result = command.run(*SMALL, option, value)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert option in result.stderr


def test_the_help_of_pinned_says_how_few_repeats_it_takes(command) -> None:
    result = command.run("bench", "pinned", "--help")
    lines = [line for line in result.stdout.splitlines() if "repeats" in line]
    assert len(lines) == 2 and all("at least 6" in line for line in lines)


@pytest.mark.long  # a dozen processes that import torch, as the test above
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is all there is")
def test_pinned_uses_all_cores_where_openmp_binds_threads(command, monkeypatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    result = command.run(*SMALL, "--ready-gib", "0.01", "--threads", "2")
    assert result.returncode == 0, result.stderr
