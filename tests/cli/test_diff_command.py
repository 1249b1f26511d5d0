"""`zerobench diff` on two comparisons of one commit."""

from __future__ import annotations

import json

from conftest import SMALL, Command


def test_two_comparisons_of_one_commit_are_no_regression(command: Command) -> None:
    for folder in ("old", "new"):
        compared = command.run(
            "compare",
            "--device",
            "cpu",
            "--strategies",
            "single",
            *SMALL,
            "--num-steps",
            "6",
            "--output-dir",
            folder,
        )
        assert compared.returncode == 0, compared.stderr
    result = command.run("diff", "old", "new", "--format", "json", "--fail-above", "90%", timeout_s=60)
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert not document["differs"] and not document["appeared"] and not document["vanished"]
    times, peaks = (table["rows"][0] for table in document["metrics"])
    assert times["rests_on"] in ("6 and 6 steps", "a busy machine") and times["ratio"] > 0
    assert peaks["verdict"] == "same within noise"


def test_a_file_that_cannot_be_read_is_one_line(command: Command) -> None:
    result = command.run("diff", "nowhere", "nowhere", timeout_s=60)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and "nowhere does not exist" in line
