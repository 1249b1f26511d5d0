"""Bytes of collectives as torch's flight recorder notes them, in real process groups."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zerobench.bench.launch.environments import free_ports
from zerobench.strategies import flight_recorder
from zerobench.strategies.flight_recorder import StepTraffic, moved_bytes

WORLD_SIZE = 3
FULL_NUMEL = 300


def entry(name, shapes, written=None, dtype="BFloat16", group="0"):
    written = shapes if written is None else written
    return {
        "profiling_name": name, "process_group": [group, "of a test"],
        "input_sizes": shapes, "input_dtypes": [dtype] * len(shapes),
        "output_sizes": written, "output_dtypes": [dtype] * len(written),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "read", "written", "expected"),
    [  # names as ProcessGroupNCCL gives them
        ("nccl:_all_gather_base", [[25]], [[100]], {"all_gather": 150}),
        ("nccl:all_gather", [[25]], [[25]] * 4, {"all_gather": 150}),
        ("nccl:all_gather_into_tensor_coalesced", [[5, 2], [15]], [[40], [60]], {"all_gather": 150}),
        ("nccl:_reduce_scatter_base", [[100]], [[25]], {"reduce_scatter": 150}),
        ("nccl:reduce_scatter_tensor_coalesced", [[60], [40]], [[15], [10]], {"reduce_scatter": 150}),
        ("nccl:all_reduce", [[100]], [[100]], {"all_reduce": 300}),
        ("nccl:allreduce_coalesced", [[60], [40]], [[60], [40]], {"all_reduce": 300}),
        ("nccl:all_to_all", [[100]], [[100]], {"all_to_all": 150}),
        ("nccl:broadcast", [[100]], [[100]], {"broadcast": 200}),
        ("nccl:reduce", [[100]], [[100]], {"reduce": 200}),
        ("nccl:all_reduce_barrier", [[1]], [[1]], {}),
        ("nccl:coalesced", [], [], {}),
        ("nccl:send", [[100]], [[100]], {}),
    ],
)
def test_a_collective_counts_what_its_algorithm_must_move(name, read, written, expected):
    assert moved_bytes([entry(name, read, written)], {"0": 4}) == expected
    assert moved_bytes([entry(name, read, written)], {"0": 1}) == {}


def test_a_dtype_of_unknown_size_is_not_guessed(monkeypatch):
    odd = entry("nccl:all_reduce", [[100]], dtype="Float4_e2m1fn_x2") | {"time_created_ns": 2**63}
    early = entry("nccl:all_reduce", [[100]]) | {"time_created_ns": 0}
    monkeypatch.setattr(flight_recorder, "recorded", lambda: ([early, odd], {"0": 4}))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    traffic = StepTraffic()
    traffic.begin_step()
    assert traffic.moved_bytes() is None


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_recorder_whose_length_was_set_keeps_it(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {name: "0"})
    flight_recorder.switch_recorder_on()
    assert os.environ == {name: "0"}


def run_rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore", FutureWarning)
    flight_recorder.switch_recorder_on()
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    traffic = StepTraffic()
    found = {"before any step": traffic.moved_bytes()}
    full = torch.ones(FULL_NUMEL, dtype=torch.bfloat16)
    shard = torch.ones(FULL_NUMEL // WORLD_SIZE)

    def step() -> None:
        traffic.begin_step()
        dist.all_reduce(full)
        dist.all_gather_into_tensor(torch.empty(FULL_NUMEL), shard)
        dist.broadcast(shard, src=0)
        dist.barrier()

    step()
    dist.all_reduce(full)  # between the steps of a reset belongs to the one before
    traffic.reset()
    step()
    step()
    found["two steps"] = traffic.moved_bytes()
    traffic.begin_step()
    found["without collectives"] = traffic.moved_bytes()
    traffic.begin_step()
    for _ in range(2100):
        dist.all_reduce(shard)
    found["more than is held"] = traffic.moved_bytes()
    found["entries"] = len(flight_recorder.recorded()[0])
    with open(f"{folder}/{rank}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    mp.spawn(run_rank, args=(free_ports(1)[0], str(folder)), nprocs=WORLD_SIZE)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(WORLD_SIZE)]


def test_the_latest_step_stands_for_all_since_the_reset(ranks):
    step = {"all_reduce": 4 * 200 * 2 // 2, "all_gather": 200 * 4, "broadcast": 100 * 4}
    for found in ranks:
        assert found["two steps"] == {name: 2 * moved for name, moved in step.items()}


def test_what_is_not_known_is_not_told(ranks):
    for found in ranks:
        assert found["before any step"] is None
        assert found["without collectives"] is None
        assert found["more than is held"] is None
        assert 0 < found["entries"] < 2100
