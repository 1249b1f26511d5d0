"""Comparisons over slower networks by the command."""

from __future__ import annotations

import json
import os

import pytest
from conftest import SMALL

from zerobench.host.network import parse_network
from zerobench.host.shaped_network import why_not_shaped


@pytest.fixture
def shaping():
    """Skip where links cannot be shaped."""
    if why := why_not_shaped(parse_network("1gbit", source="test")):
        pytest.skip(f"links cannot be shaped here: {why}")


def rows_of(command):
    results = json.loads((command.folder / "out" / "results.json").read_text())
    return {(row["strategy"], row["settings"]["network"]): row for row in results["rows"]}


def test_a_row_over_shaped_links_is_ok_and_says_so(command, shaping):
    before = os.readlink("/proc/self/ns/net")
    result = command.run(
        "compare", *SMALL, "--strategies", "ddp", "--network", "1gbit", "--network-how", "shaped",
        "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    row = rows_of(command)["ddp", "1gbit"]
    assert (row["status"], row["network_how"]) == ("ok", "shaped")
    assert command.leaves_nothing()
    assert os.readlink("/proc/self/ns/net") == before


def test_a_peer_is_skipped_where_links_are_paced(command):
    result = command.run(
        "compare", *SMALL, "--strategies", "ddp,zero1", "--network", "1gbit", "--network-how", "paced",
        "--output-dir", "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = rows_of(command)
    assert rows["ddp", "1gbit"]["status"] == "skipped"
    assert "ddp needs shaped links: use --network-how shaped" in rows["ddp", "1gbit"]["error"]
    assert (rows["zero1", "1gbit"]["status"], rows["zero1", "1gbit"]["network_how"]) == ("ok", "paced")
    assert rows["zero1", "1gbit"]["settings"]["communicator"] == "c10d"


@pytest.mark.long
def test_every_strategy_of_the_study_runs_over_slow_links(command, shaping):
    strategies, networks = ("ddp", "pipeline", "zero1", "zero2", "zero3"), ("1gbit", "2.5gbit")
    result = command.run(
        "compare", *SMALL, "--strategies", ",".join(strategies), "--network", ",".join(networks),
        "--network-how", "shaped", "--output-dir", "out", timeout_s=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = {case: (row["status"], row["network_how"]) for case, row in rows_of(command).items()}
    assert found == {(strategy, network): ("ok", "shaped") for strategy in strategies for network in networks}
