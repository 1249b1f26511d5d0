"""A process that trains with offload may fork: the child ends at once, and training goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import ranks
import torch
import zoo

import zerobench

CASE = zoo.CASES["blocks"]
RANK = ranks.Rank(0, 1, "alone")
PATIENCE_S = 40.0  # a child takes a second of CPU time to end, and cores may be shared
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"offload_optimizer": {"device": "cpu", "chunk_numel": 128}},
    "nvme": {"offload_optimizer": zoo.SWAP},
    "nvme by threads": {"offload_optimizer": zoo.SWAP | {"io_engine": "threads"}},
    "parameters too": {"offload_optimizer": zoo.SWAP, "offload_param": {"device": "nvme"}},
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("ends_by", ["exit", "close"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_forked_child_ends_and_its_parent_trains_on(placement, ends_by, tmp_path):
    config = dict(PLACEMENTS[placement])
    if config["offload_optimizer"]["device"] == "nvme":
        config["offload_optimizer"] = config["offload_optimizer"] | {"nvme_path": str(tmp_path)}
    # In a process of its own: a child of pytest's would end as pytest does.
    run = subprocess.run(
        [sys.executable, __file__, ends_by, json.dumps(config)], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    expected = zoo.train_engine(CASE, RANK, stage=3)
    assert json.loads(run.stdout) == {"children": [0, 0], "digest": expected["digest"]}
    assert not list(tmp_path.iterdir())


def train_and_fork(ends_by: str, config: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = zoo.make(CASE)
    settings = RANK.config(stage=3, **(zoo.optimizer_config(CASE) | config))
    engine = zerobench.initialize(model, config=settings, model_parameters=CASE.groups(model))
    children = []
    for step in range(CASE.steps):
        if step in (1, 3):
            children.append(exit_status_of_child(engine, ends_by))
        zoo.run_plan(engine, CASE, step, 0, [])
    digest = zoo.state_of(engine)["digest"]
    engine.close()
    return {"children": children, "digest": digest}


def exit_status_of_child(engine: Any, ends_by: str) -> int:
    child = os.fork()
    if child == 0:
        if ends_by == "close":
            engine.close()
        sys.exit(0)
    deadline = time.monotonic() + PATIENCE_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.01)
    return ended[1]


if __name__ == "__main__":
    print(json.dumps(train_and_fork(sys.argv[1], json.loads(sys.argv[2]))))
