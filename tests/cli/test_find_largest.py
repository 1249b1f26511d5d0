"""`compare --find`: the value that it names runs in fresh processes, and the next one is out of memory."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, until

LIMITED = [
    "--num-layers", "2", "--hidden-size", "32", "--num-steps", "2", "--warmup-steps", "1", "--rounds", "0",
    "--device-memory-gib", "0.003",
]  # fmt: skip
SIZES = {"batch": "--batch-size", "seq": "--seq-length", "layers": "--num-layers"}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())["rows"]


def expect_exact(command: Command, row: dict[str, Any], *, times: int, options: list[str]) -> None:
    """Run the value that was found and the next one tried as ordinary rows, in fresh processes."""
    search = row["search"]
    point = [
        SIZES[search["setting"]], f"{search['largest']},{search['too_large']}", "--strategies", row["strategy"],
        "--offload", row["settings"]["offload"],
    ]  # fmt: skip
    for number in range(times):
        out = f"{row['name']}_{number}"
        command.run("compare", *options, *point, "--output-dir", out, timeout_s=300)
        assert [row["status"] for row in rows_in(command.folder / out)] == ["ok", "oom"]


def test_an_interrupted_search_goes_on_and_is_exact(command) -> None:
    asked = [*LIMITED, "--seq-length", "32", "--strategies", "zero3", "--batch-size", "8", "--find", "batch"]
    process = command.start("compare", *asked, "--output-dir", "out")
    measured = command.folder / "out" / "measured.json"

    def has_a_try() -> bool:
        return measured.exists() and json.loads(measured.read_text())["searching"] is not None

    until(process, has_a_try, else_="no try was kept")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    tries = json.loads(measured.read_text())["searching"]["search"]["tries"]
    result = command.run("compare", *asked, "--resume", "out")
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = rows_in(command.folder / "out")
    search = row["search"]
    assert search["tries"][: len(tries)] == tries
    assert row["settings"]["batch_size"] == search["largest"] == search["too_large"] - 1
    assert len({one["value"] for one in search["tries"]}) == search["try_num"]
    assert f"The largest batch that fits is {search['largest']}, with zero3." in result.stdout
    expect_exact(command, row, times=1, options=[*LIMITED, "--seq-length", "32"])
    assert command.leaves_nothing()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("find", "options"),
    [
        ("batch", ["--strategies", "zero0,zero3", "--seq-length", "32"]),
        ("seq", ["--strategies", "zero3", "--batch-size", "4", "--offload", "none,cpu_full"]),
        ("layers", ["--strategies", "zero3", "--batch-size", "1", "--seq-length", "32"]),
    ],
)
def test_what_is_found_fits_three_times_and_the_next_value_never(command, find: str, options) -> None:
    result = command.run("compare", *LIMITED, *options, "--find", find, "--output-dir", "out", timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    for row in rows_in(command.folder / "out"):
        expect_exact(command, row, times=3, options=[*LIMITED, *options])
