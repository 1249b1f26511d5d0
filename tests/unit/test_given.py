"""Ranks that torchrun or Slurm started."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from builders import make_window

from zerobench.bench.launch.given import Answer, GivenRank, connect, given_ranks, meet, placed
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.protocol.job import Report, Verification
from zerobench.bench.protocol.place import MachinePlace
from zerobench.engine import config, topology
from zerobench.errors import ConfigError, Error
from zerobench.host.facts import HostFacts, read_host_facts
from zerobench.host.launched import slurm_first_host, with_slurm
from zerobench.results.schema import RowDtypes

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "70001", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a,b",
}  # fmt: skip


def test_ranks_of_torchrun_and_srun_are_found() -> None:
    for environment in (TORCHRUN, SRUN):
        given = given_ranks(environment)
        assert given is not None
        assert (given.rank, given.world_size, given.local_rank, given.local_world_size) == (3, 4, 1, 2)
    assert given_ranks({}) is None
    # A batch script has a process id and one process.
    assert given_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        given_ranks({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("one,two", "one"), ("n[1-2]", "n1"), ("gpu[008-011,15]-ib,login", "gpu008-ib"), ("a-[3,7]", "a-3")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert slurm_first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is missing"),
        ({key: value for key, value in SRUN.items() if key != "SLURM_LOCALID"}, "SLURM_LOCALID is missing"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "not as srun sets it"),
        (SRUN | {"SLURM_NODEID": "2"}, "no such node"),
        (TORCHRUN | {"RANK": "a"}, "RANK is 'a', not a number"),
        (TORCHRUN | {"MASTER_PORT": "0x"}, "MASTER_PORT is '0x', not a number"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536, which is not a TCP port"),
        (
            TORCHRUN | {"RANK": "4"},
            r"RANK=4 is out of range: with WORLD_SIZE=4, ranks are 0 to 3\.",
        ),
    ],
)
def test_variables_that_are_missing_or_odd_are_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        given_ranks(environment)


def test_srun_makes_an_engine_one_of_several_ranks() -> None:
    place = topology.resolve(config.parse({}), SRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert topology.resolve(config.parse({"world_size": 1}), SRUN).world_size == 1
    assert topology.resolve(config.parse({}), {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).world_size == 1
    assert with_slurm(SRUN)["MASTER_ADDR"] == "a" and with_slurm(TORCHRUN) is TORCHRUN


def test_what_is_not_finite_reaches_rank_0_as_it_is() -> None:
    dtypes = RowDtypes(
        param="float32", compute="float32", reduce="float32", master="float32", state="float32"
    )
    verification = Verification(
        loss=math.nan, norm=math.inf, evaluation=math.nan, expected_evaluations=[1.5, -math.inf]
    )
    window = make_window([1.0], [math.nan], validation_loss=math.nan)
    reports = {1: Report(dtypes=dtypes, verification=verification, window=window)}
    told = Answer.from_text(Answer.of(Outcome(status="ok", reports=reports)).text()).reports[1]
    assert told.verification is not None and told.window is not None
    assert math.isnan(told.verification.loss) and told.verification.norm == math.inf
    assert told.verification.expected_evaluations == [1.5, -math.inf]
    assert math.isnan(told.verification.evaluation or 0.0)
    assert math.isnan(told.window.losses[0]) and math.isnan(told.window.validation_loss or 0.0)


@pytest.mark.parametrize(("rank", "verb"), [("0", "serve"), ("3", "reach")])
def test_a_store_that_cannot_be_reached_is_one_sentence(rank: str, verb: str) -> None:
    given = given_ranks(TORCHRUN | {"MASTER_ADDR": "nowhere.invalid", "RANK": rank})
    assert given is not None
    with pytest.raises(
        Error, match=rf"rank {rank} cannot {verb} the ranks' store at nowhere\.invalid:1 .*MASTER_ADDR"
    ):
        connect(given)


def met(hosts: list[HostFacts], *, local: tuple[int, int] = (0, 1)) -> list[GivenRank]:
    """Return the ranks of launchers, one on each of ``hosts``, once they have met."""
    store = pytest.importorskip("torch.distributed").HashStore()
    ranks = [
        GivenRank(
            rank=rank, world_size=len(hosts), local_rank=local[0], local_world_size=local[1], master_addr="h",
            master_port=1, store=store,
        )
        for rank in range(len(hosts))
    ]  # fmt: skip
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(placed, ranks, hosts))


def host(**facts) -> HostFacts:
    given = {"environment": {}, "cpus": (0, 1, 2, 3), "machine": "m", "identity": "h"}
    return dataclasses.replace(read_host_facts(), **{**given, **facts})


def places(ranks: list[GivenRank]) -> list[tuple[int, int]]:
    return [(rank.local_rank, rank.local_world_size) for rank in ranks]


def test_launchers_on_one_machine_number_their_ranks_together() -> None:
    found = met([host(), host(), host(machine="n", identity="i")])
    assert places(found) == [(0, 2), (1, 2), (0, 1)]
    assert [rank.machine for rank in found] == [
        MachinePlace(2, 0, 2), MachinePlace(2, 1, 2), MachinePlace(1, 0, 1),
    ]  # fmt: skip


def test_hosts_that_launchers_pretend_share_the_cores_of_the_machine() -> None:
    found = met([host(identity="left"), host(identity="right")])
    assert places(found) == [(0, 1), (0, 1)]
    assert [rank.machine for rank in found] == [MachinePlace(2, 0, 2), MachinePlace(2, 1, 2)]


def test_launchers_that_are_bound_to_cores_of_their_own_share_memory_alone() -> None:
    found = met([host(cpus=(0, 1)), host(cpus=(2, 3))])
    assert places(found) == [(0, 2), (1, 2)]
    assert [rank.machine for rank in found] == [MachinePlace(2, 0, 1)] * 2


def test_launchers_that_see_gpus_of_their_own_keep_the_numbers_of_these() -> None:
    found = met([host(environment={"CUDA_VISIBLE_DEVICES": text}) for text in "01"])
    assert places(found) == [(0, 1), (0, 1)]
    assert [rank.machine for rank in found] == [MachinePlace(2, 0, 2), MachinePlace(2, 1, 2)]


def test_ranks_of_one_launcher_need_not_meet() -> None:
    given = given_ranks(TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "nowhere.invalid"})
    assert given is not None
    assert meet(given, {}) is given
    assert given.machine == MachinePlace(4, 1, 4)
