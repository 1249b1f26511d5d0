"""`bench io` and `tune io` on small files: what they say, what they write, what they refuse, what they leave."""

from __future__ import annotations

import csv
import json
import re
import signal
import time

import pytest
from conftest import until

from zerobench.host.disks import ring_refusal
from zerobench.host.storage import lockable_bytes
from zerobench.micro.io import raw_candidates

SMALL = ["--chunk-mib", "0.25", "--sample-seconds", "0.01"]
BENCH = ["bench", "io", "disk", *SMALL, "--size-gib", "0.02", "--block-bytes", "65536", "--repeats", "6"]
TUNE = ["tune", "io", "disk", "--chunk-mib", "4", "--size-gib", "0.2", "--seconds", "3"]


@pytest.fixture(autouse=True)
def disk(command):
    (command.folder / "disk").mkdir()
    (command.folder / "other").mkdir()
    yield
    assert list((command.folder / "disk").iterdir()) == [], "a swap file was left"
    assert list((command.folder / "other").iterdir()) == [], "a swap file was left"


def test_every_mode_is_measured_beside_the_disk(command) -> None:
    result = command.run(*BENCH, "--depth", "2,4", "--engines", "threads", "--output", "io.json")
    assert result.returncode == 0, result.stderr
    assert "of raw" in result.stdout
    content = json.loads((command.folder / "io.json").read_text())
    assert content["benchmark"] == "io"
    assert content["settings"]["file_bytes"] == 81 * (1 << 18)
    assert content["settings"]["devices"][0]["file_system"]
    rows = content["rows"]
    assert [(row["mode"], row["depth"]) for row in rows] == [
        (mode, depth) for mode in ("read", "write", "both") for depth in (2, 4)
    ]
    for row in rows:
        assert row["engine"] == "threads"
        assert row["gb_s"] > 0 and row["raw_gb_s"] > 0
        assert len(row["samples_gb_s"]["pager"]["samples"]) == len(row["samples_gb_s"]["raw"]["samples"]) == 6
        assert row["ratio_to_raw"]["low"] <= row["ratio_to_raw"]["value"] <= row["ratio_to_raw"]["high"]


def test_several_paths_are_striped(command) -> None:
    result = command.run(
        *BENCH, "other", "--depth", "2", "--modes", "both", "--engines", "threads", "--output", "io.csv"
    )
    assert result.returncode == 0, result.stderr
    assert "2 file(s)" in result.stdout
    with (command.folder / "io.csv").open() as file:
        assert [row["mode"] for row in csv.DictReader(file)] == ["both"]


def test_the_limit_is_the_disks_whatever_engines_are_measured() -> None:
    raw = {candidate.engine for candidate in raw_candidates()}
    assert raw == (
        {"threads"} if ring_refusal(128 << 20, lockable=lockable_bytes()) else {"threads", "io_uring"}
    )


def test_tuning_tries_most_settings_of_a_large_file_in_its_time(command) -> None:
    result = command.run(*TUNE, "--seconds", "10", "--size-gib", "2")
    assert result.returncode == 0, result.stderr
    tried, of = map(int, re.findall(r"(\d+) of (\d+) settings tried", result.stdout)[0])
    assert tried > of // 4, result.stdout  # of 6 s at 0.15 s each, opening them apart
    blocks = re.findall(r"blocks of (\d+) KiB", result.stdout)
    assert all(int(block) <= 4096 for block in blocks)  # of chunks of 4 MiB


def test_tune_prints_its_choice_as_json(command) -> None:
    result = command.run(*TUNE[:-1], "1", "--settings", "io.json", "--json")
    document = json.loads(result.stdout)
    assert list(document) == ["verdict", "path", "settings_file", "settings", "tried"]
    chosen = [document["settings"][key] for key in ("engine", "block_bytes", "depth")]
    assert chosen in [
        [tried[key] for key in ("engine", "block_bytes", "depth")] for tried in document["tried"]
    ]


def test_tune_keeps_what_it_found_and_bench_uses_it(command) -> None:
    result = command.run(*TUNE, "--settings", "config/zerobench/io.json")
    assert result.returncode == 0, result.stderr
    content = json.loads((command.folder / "config/zerobench/io.json").read_text())
    ((path, found),) = content["paths"].items()
    assert path == str((command.folder / "disk").resolve())
    assert f"chosen for disk: {found['engine']}, blocks of {found['block_bytes'] >> 10} KiB" in result.stdout
    assert found["both_bytes_per_s"] > 0
    result = command.run(
        "bench", "io", "disk", "--size-gib", "0.4", "--modes", "write", "--repeats", "1", "--sample-seconds", "0.05",
        "--settings", "config/zerobench/io.json", "--output", "io.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "config/zerobench/io.json" in result.stdout
    (row,) = json.loads((command.folder / "io.json").read_text())["rows"]
    assert (row["engine"], row["block_bytes"], row["depth"]) == (
        found["engine"],
        found["block_bytes"],
        found["depth"],
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "io", "nowhere"], "nowhere"),
        (["bench", "io"], "paths"),
        (["bench", "io", "disk", "--engines", "aio"], "'aio'"),
        (["bench", "io", "disk", "--modes", "both,append"], "'append'"),
        (["bench", "io", "disk", "--block-bytes", "1000"], "1000"),
        (["bench", "io", "disk", "--depth", "0"], "--depth 0"),
        (["bench", "io", "disk", "--block-bytes", "4194304", "--chunk-mib", "1"], "the 1048576 bytes"),
        (["bench", "io", "disk", "--repeats", "0"], "--repeats 0"),
        # 67 MiB are 0.0654 GiB, and in 0.0654 GiB there is room for 66.
        (
            [
                "bench",
                "io",
                "disk",
                "--size-gib",
                "0.0654",
                "--chunk-mib",
                "1",
                "--block-bytes",
                "1048576",
                "--depth",
                "32",
            ],
            "--size-gib is too small for these settings: give 0.066 or more",
        ),
        (["bench", "io", "disk", "--size-gib", "100000"], "not enough space"),
        (["bench", "io", "disk", "--size-gib", "nan"], "--size-gib nan"),
        (["bench", "io", "disk", "--chunk-mib", "inf"], "--chunk-mib inf"),
        (["bench", "io", "disk", "--sample-seconds", "inf"], "--sample-seconds inf"),
        (["tune", "io", "disk", "--seconds", "inf"], "--seconds inf"),
        (["tune", "io", "disk", "--settings", "/proc/io.json"], "/proc/io.json cannot be written"),
        (["bench", "io", "disk", "--output", "taken.json"], "taken.json"),
        (["bench", "io", "/proc"], "/proc"),
        (["tune", "io", "nowhere"], "nowhere"),
        (["tune", "io", "disk", "--seconds", "0"], "--seconds 0"),
        (["tune", "io", "disk", "--settings", "taken.json"], "taken.json"),
        (["tune", "io", "disk", "--size-gib", "100000"], "not enough space"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_in_one_line(command, arguments, said) -> None:
    (command.folder / "taken.json").write_text("nonsense")
    result = command.run(*arguments, timeout_s=60)
    assert result.returncode in (1, 2), result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], result.stderr
    assert (command.folder / "taken.json").read_text() == "nonsense"


def test_interrupting_leaves_no_swap_file(command) -> None:
    process = command.start(*BENCH, "--repeats", "100000", "--depth", "2")
    disk = command.folder / "disk"
    until(process, lambda: list(disk.iterdir()), else_="nothing was measured", within_s=60)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert stderr.strip().splitlines() == ["zerobench: interrupted"]


def test_info_tells_what_storage_can_do(command) -> None:
    result = command.run("info")
    assert result.returncode == 0, result.stderr
    assert "storage.io_uring:" in result.stdout
    assert "storage.gpu_direct_storage:" in result.stdout
    assert "not used: state swaps through host memory, where the CPU updates it" in result.stdout
