"""Optimizer state on the host, whole, in part or with parameters' shards, ends with the bits of state on the device.

All cases of a world size run in one group of processes.
"""

from __future__ import annotations

import pytest
import ranks
import torch
import zoo

import zerobench

HOST = {"chunk_numel": 128}  # many chunks of these small shards
PLACEMENTS = {
    "none": {},
    "host": {"offload_optimizer": HOST},
    "a third on the host": {"offload_optimizer": HOST | {"ratio": 0.33, "threads": 3}},
    "nearly all on the host": {"offload_optimizer": HOST | {"ratio": 0.9}},
    "parameters too": {"offload_optimizer": HOST, "offload_param": {}},
}
CASES = {
    name: zoo.CASES[name]
    for name in (
        "blocks",
        "clip",
        "adam with L2",
        "param groups and schedule",
        "odd sizes",
        "lora",
        "tied",
        "skipped on one rank",
        "non-reentrant",
        "evaluation in between",
        "forward in advance",
        "bf16",
        "20 steps",
        "bf16 reduced in fp32",
        "fp16",
    )
}
ON_OTHERS = ("odd sizes", "bf16", "fp16")
RUNS = {1: ON_OTHERS, 2: tuple(CASES), 3: ON_OTHERS}

pytestmark = pytest.mark.usefixtures("one_thread")


def stages_of(placement: str) -> tuple[int, ...]:
    return (3,) if placement == "parameters too" else (1, 2, 3)


def train_all(rank: ranks.Rank, names: tuple[str, ...]) -> dict[tuple[str, str, int], dict]:
    return {
        (name, placement, stage): zoo.train_or_error(CASES[name], rank, stage=stage, **config)
        for name in names
        for placement, config in PLACEMENTS.items()
        for stage in stages_of(placement)
    }


@pytest.fixture(scope="module")
def results():
    return {
        world_size: ranks.run(train_all, names, world_size=world_size) for world_size, names in RUNS.items()
    }


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "none"])
@pytest.mark.parametrize(("world_size", "case"), [(w, name) for w, names in RUNS.items() for name in names])
def test_ends_with_the_bits_of_state_on_the_device(results, world_size, case, placement):
    for rank in results[world_size]:
        for stage in stages_of(placement):
            zoo.assert_same_end(rank[case, placement, stage], rank[case, "none", stage], stage=stage)


def test_fp16_skips_steps_in_these_runs(results):
    """Else the comparison above would say nothing about them."""
    applied = results[2][0]["fp16", "host", 2]["applied"]
    assert any(applied) and not all(applied)


def bytes_held(rank: ranks.Rank, config: dict) -> dict:
    case = CASES["bf16"]
    model = zoo.make(case)
    engine = zerobench.initialize(model, config=rank.config(stage=3, precision="bf16", **config))
    zoo.run_plan(engine, case, 0, rank.rank, [])
    held = engine.memory_bytes(peak=False)
    held["shard_numel"] = sum(flat["shard_numel"] for unit in engine.units() for flat in unit["flats"])
    engine.close()
    return held


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_ledger_shows_what_lies_where(world_size):
    for placement in ("host", "parameters too"):
        for held in ranks.run(bytes_held, PLACEMENTS[placement], world_size=world_size):
            shard = held["shard_numel"]
            states = {"master": 4 * shard, "exp_avg": 4 * shard, "exp_avg_sq": 4 * shard}
            assert not states.keys() & held["device"].keys()
            host = states | {"gradients": 2 * shard, "staging": 3 * 128 * 4}
            if placement == "parameters too":
                host["parameters"] = 2 * shard
                assert "parameters" not in held["device"]
            else:
                assert held["device"]["parameters"] == 2 * shard
            assert held["host"] == host


def write_and_train(rank: ranks.Rank, config: dict) -> str:
    case = CASES["blocks"]
    model = zoo.make(case)
    engine = zerobench.initialize(model, config=rank.config(stage=2, **config))
    for step in range(3):
        zoo.run_plan(engine, case, step, rank.rank, [])
        with engine.gather(modifier_rank=1), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5 if rank.rank == 1 else 3.0)
    digest = zoo.state_of(engine)["digest"]
    engine.close()
    return digest


def test_written_parameters_reach_masters_on_the_host():
    digests = {
        tuple(ranks.run(write_and_train, PLACEMENTS[placement]))
        for placement in ("none", "host", "a third on the host")
    }
    assert len(digests) == 1


def start_and_leave(rank: ranks.Rank) -> None:
    """A step whose updates nobody waits for, then the engine goes."""
    case = CASES["bf16"]
    for _ in range(3):
        engine = zerobench.initialize(
            zoo.make(case),
            config=rank.config(stage=2, precision="bf16", offload_optimizer={"chunk_numel": 64}),
        )
        zoo.run_plan(engine, case, 0, rank.rank, [])
        engine.close()


def test_an_engine_closes_with_updates_under_way():
    ranks.run(start_and_leave)


def too_large(rank: ranks.Rank) -> str:
    """The engine is asked for more than the host has, on the meta device, so that nothing else is."""
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 20, 1 << 20)
    try:
        zerobench.initialize(
            model,
            config=rank.config(stage=3, precision="bf16", device="cpu", offload_optimizer={}),
            materialise=lambda *_, **__: None,
        )
    except zerobench.errors.OutOfMemoryError as error:
        return str(error)
    return "no error"


def test_a_host_that_is_too_small_says_how_much_is_missing():
    for message in ranks.run(too_large):
        assert "on the host, of 2 ranks, needs" in message and "are missing" in message, message
