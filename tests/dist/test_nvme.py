"""Optimizer state on NVMe, all of it or what a budget leaves, ends with the bits of state on the device.

All cases of a world size run in one group of processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import zoo
from noticed import noticed

import zerobench
from zerobench.engine.swap_watch import SwapWatch
from zerobench.errors import CommunicationError, OutOfMemoryError

SWAP = zoo.SWAP | {"io_checksums": True}
PLACEMENTS = {
    "all": SWAP,
    "what a budget leaves": SWAP | {"host_memory_bytes": 200_000},
    "a third": SWAP | {"ratio": 0.33},
    "threads": SWAP | {"io_engine": "threads"},
    "parameters too": SWAP,
    "parameters too, within a budget": SWAP | {"host_memory_bytes": 240_000},
    "parameters on the host": SWAP,
}
PARAMETERS = {
    "parameters too": {"device": "nvme"},
    "parameters too, within a budget": {"device": "nvme"},
    "parameters on the host": {"device": "cpu"},
}
CASES = {
    name: zoo.CASES[name]
    for name in (
        "clip",
        "param groups and schedule",
        "odd sizes",
        "unused",
        "skipped on one rank",
        "order differs",
        "bf16",
        "20 steps",
        "fp16",
        "lora",
        "two forwards, two backwards",
        "evaluation in between",
    )
}
# The state is as in the others.
OF_PARAMETERS = ("lora", "two forwards, two backwards", "evaluation in between")
RUNS = {1: ("odd sizes", "fp16"), 2: tuple(CASES)}

pytestmark = pytest.mark.usefixtures("one_thread")


def placements_of(case: str) -> list[str]:
    return [name for name in PLACEMENTS if name in PARAMETERS or case not in OF_PARAMETERS]


def stages_of(placement: str) -> tuple[int, ...]:
    return (3,) if placement in PARAMETERS else (1, 2, 3)


def train_all(rank: ranks.Rank, names: tuple[str, ...], path: str) -> dict[tuple[str, str, int], dict]:
    results = {}
    for name in names:
        for placement in ("device", *placements_of(name)):
            config: dict = {}
            if placement != "device":
                config["offload_optimizer"] = PLACEMENTS[placement] | {"nvme_path": [path, path]}
            if placement in PARAMETERS:
                config["offload_param"] = PARAMETERS[placement]
            for stage in stages_of(placement):
                results[name, placement, stage] = zoo.train_or_error(CASES[name], rank, stage=stage, **config)
    return results


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def results(disk: Path):
    found = {
        world_size: ranks.run(train_all, names, str(disk), world_size=world_size)
        for world_size, names in RUNS.items()
    }
    assert list(disk.iterdir()) == [], "a swap file was left"
    return found


@pytest.mark.parametrize(
    ("world_size", "case", "placement"),
    [(w, name, place) for w, names in RUNS.items() for name in names for place in placements_of(name)],
)
def test_ends_with_the_bits_of_state_on_the_device(results, world_size, case, placement):
    for rank in results[world_size]:
        for stage in stages_of(placement):
            zoo.assert_same_end(rank[case, placement, stage], rank[case, "device", stage], stage=stage)


def swapped(rank: ranks.Rank, path: str, budget_bytes: int | None) -> dict:
    case = CASES["bf16"]
    model = zoo.make(case)
    offload = SWAP | {"nvme_path": path, "host_memory_bytes": budget_bytes}
    engine = zerobench.initialize(
        model, config=rank.config(stage=2, precision="bf16", offload_optimizer=offload)
    )
    before = engine.swap_stats()
    zoo.run_plan(engine, case, 0, rank.rank, [])
    engine.full_optimizer_state("exp_avg")
    stats, held = engine.swap_stats(), engine.memory_bytes(peak=False)
    engine.close()
    return {
        "written": stats["written_bytes"] - before["written_bytes"],
        "nvme": sum(held.get("nvme", {}).values()),
        "host": sum(held["host"].values()),
    }


def watched(rank: ranks.Rank, path: str) -> list[str]:
    case = CASES["bf16"]
    SwapWatch.least_share = 0.0  # whatever the disk is like
    engine = zerobench.initialize(
        zoo.make(case),
        config=rank.config(stage=2, precision="bf16", offload_optimizer=SWAP | {"nvme_path": path}),
    )
    with noticed() as texts:
        for step in range(SwapWatch.first_steps + SwapWatch.watched_steps + 1):
            zoo.run_plan(engine, case, step, rank.rank, [])
    engine.close()
    return texts


def test_waits_for_files_are_told_of_once_on_a_host(disk: Path):
    first, second = ranks.run(watched, str(disk), world_size=2)
    assert not second
    assert len(first) == 1 and f"waits for files in {disk} for" in first[0], first


def test_a_budget_keeps_state_in_memory(disk: Path):
    (none,) = ranks.run(swapped, str(disk), None, world_size=1)
    (some,) = ranks.run(swapped, str(disk), none["host"] + 40_000, world_size=1)
    (all_,) = ranks.run(swapped, str(disk), 1 << 30, world_size=1)
    assert none["nvme"] > some["nvme"] > all_["nvme"] == 0
    assert none["written"] > some["written"] > all_["written"] == 0
    assert none["host"] < some["host"] <= none["host"] + 40_000


def swapped_parameters(rank: ranks.Rank, path: str, budget_bytes: int | None) -> dict:
    case = CASES["bf16"]
    offload = SWAP | {"nvme_path": path, "host_memory_bytes": budget_bytes}
    engine = zerobench.initialize(
        zoo.make(case),
        config=rank.config(
            stage=3, precision="bf16", offload_optimizer=offload, offload_param={"device": "nvme"}
        ),
    )
    for step in range(4):
        zoo.run_plan(engine, case, step, rank.rank, [])
    engine.offload_traffic()  # waits for updates
    before, moved = engine.swap_stats(), engine.offload_traffic()
    zoo.run_plan(engine, case, 4, rank.rank, [])
    after_traffic = engine.offload_traffic()
    after, held = engine.swap_stats(), engine.memory_bytes(peak=False)
    numel = sum(flat["shard_numel"] for unit in engine.units() for flat in unit["flats"])
    engine.close()
    return {
        "numel": numel,
        "sent": after_traffic["to_device_bytes"] - moved["to_device_bytes"],
        "written": after["written_bytes"] - before["written_bytes"],
        "held": held,
        "host": sum(held["host"].values()),
    }


def test_parameters_lie_in_files_but_for_what_a_budget_keeps(disk: Path):
    (none,) = ranks.run(swapped_parameters, str(disk), None, world_size=1)
    assert none["held"]["nvme"]["parameters"] == 2 * none["numel"]
    assert "parameters" not in none["held"]["host"] and "parameters" not in none["held"]["device"]
    # Each unit is gathered for forward and for backward, but those that stay in between.
    assert 2 * none["numel"] <= none["sent"] <= 4 * none["numel"]
    (some,) = ranks.run(swapped_parameters, str(disk), none["host"] + 40_000, world_size=1)
    (all_,) = ranks.run(swapped_parameters, str(disk), 1 << 30, world_size=1)
    assert some["held"]["nvme"]["parameters"] < none["held"]["nvme"]["parameters"]
    assert "nvme" not in all_["held"]
    assert none["written"] > some["written"] > all_["written"] == 0
    assert some["host"] <= none["host"] + 40_000
    assert list(disk.iterdir()) == []


def too_little(rank: ranks.Rank, path: str) -> str:
    offload = SWAP | {"nvme_path": path, "host_memory_bytes": 1000}
    try:
        zerobench.initialize(
            zoo.make(CASES["bf16"]), config=rank.config(stage=2, precision="bf16", offload_optimizer=offload)
        )
    except OutOfMemoryError as error:
        return str(error)
    return ""


def test_a_budget_below_the_buffers_is_an_error(disk: Path):
    (text,) = ranks.run(too_little, str(disk), world_size=1)
    assert "host_memory_bytes" in text


def nowhere(rank: ranks.Rank, path: str) -> str:
    offload = SWAP | {"nvme_path": f"{path}/nowhere"}
    try:
        zerobench.initialize(
            zoo.make(CASES["bf16"]), config=rank.config(stage=2, precision="bf16", offload_optimizer=offload)
        )
    except (OSError, CommunicationError) as error:  # the second to come may be told by the first
        return str(error)
    return ""


def test_a_missing_path_is_an_error_on_every_rank(disk: Path):
    for text in ranks.run(nowhere, str(disk), world_size=2):
        assert "nowhere" in text
    assert list(disk.iterdir()) == []
