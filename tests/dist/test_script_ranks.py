"""Whatever starts a script's processes, they train as one engine, and say so where they cannot."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_scripts
import ranks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_scripts import COMMUNICATORS, STAGES

import zerobench
from zerobench.bench.launch.environments import free_ports
from zerobench.engine import process_groups
from zerobench.errors import ConfigError

SUBGROUPS = ([0, 1], [2, 3])
# What may be set where the tests run, and would give the processes a rank.
FOREIGN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(SLURM|OMPI|PMI|PMIX|PET|MPI|MV2|TORCHELASTIC|MASTER|JSM|FLUX)_.*|"
    r"I_MPI_.*|ZEROBENCH_(RENDEZVOUS|HOST)"
)


@pytest.fixture(autouse=True, scope="module")
def clean_environment():
    """Children inherit it."""
    before = dict(os.environ)
    start_afresh(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def start_afresh(environment: Any, **given: Any) -> None:
    """As a launcher leaves the environment that sets only what is given."""
    for name in [name for name in environment if FOREIGN.fullmatch(name)]:
        del environment[name]
    environment.update({"GLOO_SOCKET_IFNAME": "lo"} | {name: str(value) for name, value in given.items()})


def expect_trained(results: list[dict[tuple[str, int], dict[str, Any]]], numbers: list[int]) -> None:
    """Every engine of these ranks has what plain PyTorch has, and no rank trained for itself."""
    plain = rank_scripts.plain_training(numbers)
    alone = rank_scripts.plain_training(numbers[:1])
    assert not torch.allclose(plain["0.weight"], alone["0.weight"], rtol=0, atol=1e-3)
    for rank, cells in enumerate(results):
        assert set(cells) == {(kind, stage) for kind in COMMUNICATORS for stage in STAGES}
        for (kind, stage), cell in cells.items():
            assert cell["place"] == (rank, len(numbers), rank, len(numbers)), (kind, stage)
            assert cell["communicator"] == ("shm" if kind == "auto" else kind)
            for name, tensor in cell["parameters"].items():
                torch.testing.assert_close(tensor, plain[name], rtol=0, atol=2e-6)


# --- torch.multiprocessing.spawn ------------------------------------------------------------------------------------


def spawned(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    found: dict[str, Any] = {"cells": rank_scripts.train_all(rank)}
    found["half"] = refusal(rank=rank)
    found["alone"] = refusal(rank=0, world_size=1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # of hosts
    found["hosts"] = refusal()
    found["cured"] = rank_scripts.train(rank, stage=2, process_group=dist.group.WORLD)
    group = process_groups.find_group(None, host="a", machine="a")
    without_store = dataclasses.replace(group, store=None)  # as with the backend "mpi"
    found["without a store"] = process_groups.meet(without_store, launched=None, timeout_s=60)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def refusal(process_group: Any = None, **config: Any) -> str | None:
    """Return the error that an engine of this configuration is, or None."""
    try:
        zerobench.initialize(rank_scripts.make_model(), config=config, process_group=process_group).close()
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def spawn_results(tmp_path_factory, clean_environment) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("spawned")
    mp.spawn(spawned, args=(str(folder), free_ports(1)[0]), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_ranks_of_a_process_group_train_together(spawn_results):
    expect_trained([found["cells"] for found in spawn_results], [0, 1])


def test_a_configuration_that_agrees_with_the_group_half_way_is_enough(spawn_results):
    assert [found["half"] for found in spawn_results] == [None, None]


def test_a_configuration_that_contradicts_the_group_is_named(spawn_results):
    for rank, found in enumerate(spawn_results):
        assert "sets rank=0 and world_size=1, but torch.distributed's default process group" in found["alone"]
        assert f"makes this process rank {rank} of 2. Remove rank and world_size" in found["alone"]


def test_variables_that_count_hosts_are_named_and_a_given_group_is_the_cure(spawn_results):
    for rank, found in enumerate(spawn_results):
        assert found["hosts"].startswith(
            "RANK=0 and WORLD_SIZE=1 disagree with torch.distributed's default process"
        )
        assert found["cured"]["place"] == (rank, 2, rank, 2)


def test_ranks_whose_group_has_no_store_meet_all_the_same(spawn_results):
    meetings = [found["without a store"] for found in spawn_results]
    assert [meeting.local for meeting in meetings] == [(0, 2), (1, 2)]
    assert meetings[0].point == meetings[1].point


# --- subgroups ------------------------------------------------------------------------------------------------------


def in_subgroups(rank: ranks.Rank, store: str) -> dict[str, Any]:
    start_afresh(os.environ)
    number = rank.rank
    dist.init_process_group("gloo", rank=number, world_size=4, init_method=f"file://{store}")
    groups = [dist.new_group(numbers) for numbers in SUBGROUPS]
    dist.new_group(
        [1, 2]
    )  # some ranks are in more groups than others, and torch names groups by their number
    mine = groups[number // 2]
    found: dict[str, Any] = {"outside": refusal(process_group=groups[1 - number // 2])}
    found["both"] = rank_scripts.train_all(number, process_group=mine)
    dist.barrier()
    if number < 2:
        found["one"] = rank_scripts.train_all(number, process_group=mine, rendezvous="the same everywhere")
    dist.barrier()
    os.environ |= dict(RANK=str(number), WORLD_SIZE="4", LOCAL_RANK=str(number), LOCAL_WORLD_SIZE="4")
    found["torchrun's"] = rank_scripts.train(number, stage=3, process_group=mine)
    found["all"] = rank_scripts.train(number, stage=3)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def subgroup_results(tmp_path_factory, clean_environment) -> list[dict[str, Any]]:
    return ranks.run(
        in_subgroups, str(tmp_path_factory.mktemp("store") / "file"), world_size=4, timeout_s=120.0
    )


def test_two_subgroups_train_at_the_same_time(subgroup_results):
    for numbers in SUBGROUPS:
        expect_trained([subgroup_results[number]["both"] for number in numbers], numbers)


def test_one_subgroup_trains_while_other_ranks_do_not(subgroup_results):
    expect_trained([subgroup_results[number]["one"] for number in SUBGROUPS[0]], SUBGROUPS[0])


def test_ranks_of_subgroups_keep_the_place_that_the_launcher_gave_them(subgroup_results):
    for number, found in enumerate(subgroup_results):
        assert found["both"]["auto", 0]["launched"] is None
        assert found["torchrun's"]["place"] == (number % 2, 2, number % 2, 2)
        assert found["torchrun's"]["launched"] == (number, 4)
        assert found["all"]["place"] == (number, 4, number, 4)


def test_a_process_outside_of_the_group_is_told(subgroup_results):
    for found in subgroup_results:
        assert found["outside"].startswith(
            "this process is not in the group that was passed as process_group. Call"
        )


# --- launchers ------------------------------------------------------------------------------------------------------

# One srun task a node starts torchrun, so its variables are about other ranks.
SRUN_OF_NODES = dict(
    SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_LOCALID=0, SLURM_NODEID=1, SLURM_STEP_TASKS_PER_NODE="1(x2)",
    SLURM_STEP_NODELIST="a,b", SLURM_JOB_ID=7, SLURM_STEP_ID=0,
)  # fmt: skip


@pytest.mark.parametrize(("how", "outer"), [("group", {}), ("environment", SRUN_OF_NODES)])
def test_ranks_of_torchrun_train_together(tmp_path, how, outer):
    environment = dict(os.environ)
    start_afresh(environment, **outer)
    port = free_ports(1)[0]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    command += ["--master-addr", "127.0.0.1", rank_scripts.__file__, str(tmp_path), how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    expect_trained(results, [0, 1])
    assert [cells["auto", 0]["launched"] for cells in results] == [(0, 2), (1, 2)]


def open_mpi(rank: ranks.Rank, ranks_here: int = 2) -> dict[str, Any]:
    return {
        "OMPI_COMM_WORLD_RANK": rank.rank,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank.rank % ranks_here,
        "OMPI_COMM_WORLD_LOCAL_SIZE": ranks_here,
        "PMIX_NAMESPACE": rank.meeting_point,
    }


def hydra(rank: ranks.Rank) -> dict[str, Any]:
    return {"PMI_RANK": rank.rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank.rank, "MPI_LOCALNRANKS": 2}


def under_mpirun(rank: ranks.Rank, port: int) -> dict[str, Any]:
    """Three launches one after the other, the last one of two hosts."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found: dict[str, Any] = {}
    start_afresh(os.environ, **open_mpi(rank))
    found["no address"] = refusal(communicator="c10d")
    start_afresh(os.environ, **open_mpi(rank), **address)
    found["Open MPI"] = rank_scripts.train_all(rank.rank)
    dist.destroy_process_group()  # the engines made it
    start_afresh(os.environ, **hydra(rank))
    found["no job"] = refusal()
    start_afresh(os.environ, **hydra(rank), I_MPI_HYDRA_UUID=f"{rank.meeting_point}-hydra")
    found["Intel MPI"] = rank_scripts.train(rank.rank, stage=3)
    start_afresh(os.environ, MV2_COMM_WORLD_SIZE=2, MV2_COMM_WORLD_RANK=rank.rank)
    found["unknown"] = refusal()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port + 1}
    start_afresh(os.environ, **open_mpi(rank, ranks_here=1), **address, ZEROBENCH_HOST=rank.rank)
    found["hosts"] = rank_scripts.train(rank.rank, stage=2)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def mpi_results(clean_environment) -> list[dict[str, Any]]:
    return ranks.run(under_mpirun, free_ports(2)[0], timeout_s=120.0)


def test_ranks_of_mpirun_train_together(mpi_results):
    expect_trained([found["Open MPI"] for found in mpi_results], [0, 1])
    for rank, found in enumerate(mpi_results):
        assert found["Intel MPI"]["place"] == (rank, 2, rank, 2)
        assert found["hosts"]["place"] == (rank, 2, 0, 1) and found["hosts"]["communicator"] == "c10d"
        for cell in (found["Intel MPI"], found["hosts"]):
            for name, tensor in rank_scripts.plain_training([0, 1]).items():
                torch.testing.assert_close(cell["parameters"][name], tensor, rtol=0, atol=2e-6)


def test_ranks_of_mpirun_that_cannot_meet_learn_what_to_set(mpi_results):
    for found in mpi_results:
        assert "MASTER_ADDR and MASTER_PORT are not set: start the ranks with torchrun" in found["no address"]
        assert "the variable ZEROBENCH_RENDEZVOUS, to the same unique text on all ranks" in found["no job"]
        assert found["unknown"].startswith("MV2_COMM_WORLD_SIZE=2 means several ranks")
