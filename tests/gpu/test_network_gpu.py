"""Collectives by phase on two GPUs, and the report that rests on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("collectives need two GPUs", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)
STRATEGIES = ["ddp", "pipeline", "zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("network")
    subprocess.run(
        [
            sys.executable, "-m", "zerobench", "recipe", "run", "parallelism", "--strategies", *STRATEGIES, "--model",
            "gpt-64m", "--seq-length", "512", "--grad-accum", "2", "--network", "native", "--num-steps", "5",
            "--rounds", "0", "--output-dir", "out",
        ],
        cwd=found,
        check=True,
        timeout=550,
    )  # fmt: skip
    return found / "out"


@pytest.fixture(scope="module")
def rows(folder):
    return {row["strategy"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_of_a_step_add_up_to_what_it_moves(rows, strategy):
    row = rows[strategy]
    assert row["status"] == "ok", row["error"]
    moved = Counter()
    for one in row["collectives"]:
        assert one["ms"] is None and one["calls"] > 0
        moved[one["name"]] += one["bytes"]
    whole = row["communication_by_collective"]
    assert moved.keys() == whole.keys()
    for name, bytes_ in moved.items():
        assert bytes_ == pytest.approx(whole[name], rel=0.05)


def test_step_times_on_more_hosts_are_predicted(folder):
    found = subprocess.run(
        [sys.executable, "-m", "zerobench", "network", str(folder), "--at", "10gbit,1gbit", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    strategies = json.loads(found.stdout)["strategies"]
    assert {one["strategy"] for one in strategies} == set(STRATEGIES)
    for one in strategies:
        times = {(each["network"], each["hosts"]): each["predicted_ms"] for each in one["predictions"]}
        assert times["1gbit", 2] > times["10gbit", 2] > 0
