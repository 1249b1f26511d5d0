"""Which communicators an engine gets, as far as that is decided before any are made."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zerobench import _native  # noqa: E402
from zerobench.engine import config, process_groups, topology  # noqa: E402
from zerobench.engine.process_groups import RankGroup  # noqa: E402
from zerobench.errors import CommunicationError, ConfigError  # noqa: E402
from zerobench.host.facts import read_host_facts  # noqa: E402
from zerobench.host.identity import host_identity, machine_identity  # noqa: E402
from zerobench.host.meeting import expect_reached, probe  # noqa: E402


def test_ranks_meet_where_a_way_leads_to_one_of_the_addresses() -> None:
    no_way = OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    expect_reached([no_way, None], "two-addresses")
    with pytest.raises(
        CommunicationError,
        match=r"cannot connect at one-address \(MASTER_ADDR\): Network is unreachable.*`ip link set lo up`",
    ):
        expect_reached([no_way], "one-address")
    for told_by_torch in ([], [OSError(errno.EACCES, "")]):
        expect_reached(told_by_torch, "unknown")


def test_a_probe_tells_whether_the_kernel_has_a_way() -> None:
    family, kind = socket.AF_INET, socket.SOCK_DGRAM
    with socket.socket(family, kind) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        assert probe((family, kind, 17, "", receiver.getsockname())) is None
        with pytest.raises(BlockingIOError):  # nothing was sent
            receiver.recv(1)
    broadcast = ("255.255.255.255", 9)  # without SO_BROADCAST the kernel refuses it on every machine
    assert isinstance(probe((family, kind, 17, "", broadcast)), OSError)


def made(device: Any = None, environment: Any = None, **values: Any) -> topology.Communicators:
    parsed, variables = config.parse({"world_size": 1, "rank": 0, **values}), environment or {}
    place = topology.resolve(parsed, variables)
    return topology.make_communicators(_native.load(), parsed, place, device, environment=variables)


def environment(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


TORCHRUN = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
SRUN = (
    "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=2 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3(x2) "
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=a,b"
)
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
    "PMIX_NAMESPACE=prterun-h-5@1 PMIX_RANK=6"
)
HYDRA = "PMI_RANK=9 PMI_SIZE=12 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=6 PMI_FD=9"
PALS = "PMI_RANK=9 PMI_SIZE=12 PMI_LOCAL_RANK=3 PMI_LOCAL_SIZE=6 PALS_APID=u"
BATCH = "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=6 SLURM_JOB_ID=7"
PET = "PET_NPROC_PER_NODE=4"


@pytest.mark.parametrize(
    ("values", "text", "place"),
    [
        ({}, "", (0, 1, 0, 1)),
        ({"world_size": 4, "rank": 3}, "", (3, 4, 3, 4)),
        ({"world_size": 4, "rank": 2, "local_world_size": 2}, "", (2, 4, 0, 2)),
        ({}, "RANK=3 WORLD_SIZE=6 LOCAL_WORLD_SIZE=3", (3, 6, 0, 3)),
        ({}, "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8", (1, 2, 1, 2)),
        ({"world_size": 1}, "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3", (0, 1, 0, 1)),
        # Each source alone.
        ({}, TORCHRUN, (3, 4, 1, 2)),
        ({}, SRUN, (5, 6, 2, 3)),
        ({}, OPEN_MPI, (6, 8, 2, 4)),
        ({}, HYDRA, (9, 12, 3, 6)),
        ({}, PALS, (9, 12, 3, 6)),
        ({}, "RANK=3 WORLD_SIZE=4", (3, 4, 3, 4)),
        ({}, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_UNIVERSE_SIZE=8", (0, 1, 0, 1)),
        # The higher one counts, and what is wrong below it is not read.
        ({"rank": 1, "world_size": 2}, f"{TORCHRUN} {SRUN} {OPEN_MPI} {HYDRA}", (1, 2, 1, 2)),
        ({}, f"{TORCHRUN} {SRUN} {OPEN_MPI} {HYDRA}", (3, 4, 1, 2)),
        ({}, f"{OPEN_MPI} {HYDRA}", (6, 8, 2, 4)),
        ({}, f"{TORCHRUN} SLURM_STEP_NUM_TASKS=2 OMPI_COMM_WORLD_SIZE=2 PMI_SIZE=x", (3, 4, 1, 2)),
        ({"rank": 0, "world_size": 1}, f"RANK=0 {PET} PMI_SIZE=4 MV2_COMM_WORLD_SIZE=4", (0, 1, 0, 1)),
        ({}, f"{TORCHRUN} {PET}", (3, 4, 1, 2)),
        # torchrun in a step of one task a node: its ranks have the step's variables, too.
        ({}, f"{TORCHRUN} SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0", (3, 4, 1, 2)),
        # mpirun in a Slurm job starts its daemons by srun, one a node.
        ({}, f"{OPEN_MPI} SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0", (6, 8, 2, 4)),
        ({}, f"{HYDRA} SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0", (9, 12, 3, 6)),
        # srun --mpi=pmi2 sets both.
        ({}, f"{SRUN} PMI_RANK=5 PMI_SIZE=6", (5, 6, 2, 3)),
        # One process, whatever it has of a step: a batch script, and mpirun in one.
        ({}, BATCH, (0, 1, 0, 1)),
        ({}, f"{BATCH} {OPEN_MPI}", (6, 8, 2, 4)),
        ({}, "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", (0, 1, 0, 1)),
        ({}, "WORLD_SIZE=1", (0, 1, 0, 1)),
        ({}, "RANK= WORLD_SIZE=", (0, 1, 0, 1)),
        # Half of a configuration is compared with the source that gives the other half.
        ({"world_size": 4}, TORCHRUN, (3, 4, 1, 2)),
        ({"rank": 6}, OPEN_MPI, (6, 8, 2, 4)),
        # Local numbers come from whichever source gives the same rank.
        ({"rank": 3, "world_size": 4}, TORCHRUN, (3, 4, 1, 2)),
        ({"rank": 6, "world_size": 8}, f"RANK=0 WORLD_SIZE=2 {OPEN_MPI}", (6, 8, 2, 4)),
        ({"rank": 2, "world_size": 4}, TORCHRUN, (2, 4, 2, 4)),
        ({"local_rank": 0, "local_world_size": 1}, TORCHRUN, (3, 4, 0, 1)),
        ({"local_world_size": 3}, "RANK=3 WORLD_SIZE=5 LOCAL_RANK=1", (3, 5, 1, 3)),  # hosts of 2 and 3 ranks
    ],
)
def test_the_first_complete_source_gives_the_rank(values, text, place) -> None:
    found = topology.resolve(config.parse(values), environment(text))
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place


def without(text: str, name: str) -> str:
    return " ".join(word for word in text.split() if not word.startswith(f"{name}="))


@pytest.mark.parametrize(
    ("values", "text", "said"),
    [
        ({}, "RANK=4 WORLD_SIZE=4", "RANK=4 is out of range: with WORLD_SIZE=4, ranks are 0 to 3."),
        ({}, "RANK=-1 WORLD_SIZE=2", "RANK=-1 is out of range: with WORLD_SIZE=2, ranks are 0 to 1."),
        ({}, "RANK=1 WORLD_SIZE=1", "RANK=1 is out of range: with WORLD_SIZE=1, the only rank is 0."),
        ({}, "RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0 is out of range: it counts ranks and must be 1 or more."),
        ({}, "RANK=x WORLD_SIZE=2", "RANK is 'x', not a number"),
        (
            {},
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2",
            "OMPI_COMM_WORLD_RANK=2 is out of range: with OMPI_COMM_WORLD_SIZE=2, ranks are 0 to 1.",
        ),
        (
            {},
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=-1",
            "LOCAL_RANK=-1 is out of range: with WORLD_SIZE=2, local ranks are 0 to 1.",
        ),
        (
            {},
            "RANK=3 WORLD_SIZE=8 LOCAL_RANK=4 LOCAL_WORLD_SIZE=4",
            "LOCAL_RANK=4 is out of range: with LOCAL_WORLD_SIZE=4, local ranks are 0 to 3.",
        ),
        ({}, "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0 is out of range"),
        ({}, SRUN.replace("LOCALID=2", "LOCALID=3"), "SLURM_LOCALID=3 is out of range"),
        ({}, SRUN.replace("PROCID=5", "PROCID=6"), "SLURM_PROCID=6 is out of range"),
        # Half set.
        ({}, "RANK=0", "RANK=0 is set and WORLD_SIZE is not. Set both or neither, or start"),
        ({}, "RANK=3", "RANK=3 is set and WORLD_SIZE is not"),
        ({}, f"WORLD_SIZE=6 {SRUN}", "WORLD_SIZE=6 is set and RANK is not. Set both or neither"),
        ({}, without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is missing"),
        ({}, without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE=8 is set and OMPI_COMM_WORLD_RANK is"),
        ({}, without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_RANK=6 is set and OMPI_COMM_WORLD_SIZE is"),
        ({}, without(HYDRA, "PMI_RANK"), "PMI_SIZE=12 is set and PMI_RANK is not"),
        ({"world_size": 4}, "", "the configuration sets world_size=4 and not rank. Set both, or remove it"),
        ({"rank": 0}, "", "the configuration sets rank=0 and not world_size. Set both"),
        ({"world_size": 8}, TORCHRUN, "sets world_size=8, but the environment has RANK=3 and WORLD_SIZE=4. Remove "),
        ({"rank": 0}, OPEN_MPI, "rank=0, but the environment has OMPI_COMM_WORLD_RANK=6 and OMPI_COMM_WORLD_SIZE=8"),
        ({"local_rank": 2}, TORCHRUN, "local_rank=2 is out of range: with local_world_size=2, local ranks are 0 to 1"),
        # Several ranks, and none that is this one.
        ({}, "MV2_COMM_WORLD_SIZE=4", "MV2_COMM_WORLD_SIZE=4 means several ranks, .* Set RANK and WORLD_SIZE, start"),
        ({}, "MPI_LOCALNRANKS=4 MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=4 means several ranks"),
        ({}, PET, "PET_NPROC_PER_NODE=4 is an option of torchrun, and RANK is not set. Start .* with `torchrun`"),
        ({}, f"{PET} {SRUN}", "Start the script with `torchrun`"),
    ],
)  # fmt: skip
def test_variables_that_give_no_rank_are_an_error_that_names_them(values, text, said) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        topology.resolve(config.parse(values), environment(text))


@pytest.mark.parametrize(
    ("values", "text", "point"),
    [
        ({"rendezvous": "mine"}, OPEN_MPI, "mine"),
        ({}, OPEN_MPI, "PMIX_NAMESPACE=prterun-h-5@1"),
        ({}, without(OPEN_MPI, "PMIX_NAMESPACE") + " OMPI_MCA_ess_base_jobid=5", "OMPI_MCA_ess_base_jobid=5"),
        ({}, f"{HYDRA} I_MPI_HYDRA_UUID=ab", "I_MPI_HYDRA_UUID=ab"),
        ({}, PALS, "PALS_APID=u"),
        ({}, f"{HYDRA} {BATCH}", None),  # two of them in one job would meet
        ({}, f"{HYDRA} ZEROBENCH_RENDEZVOUS=mine", "ZEROBENCH_RENDEZVOUS=mine"),
        ({}, SRUN, "SLURM_JOB_ID=7/SLURM_STEP_ID=0"),
        ({}, f"{TORCHRUN} TORCHELASTIC_RUN_ID=r MASTER_PORT=5", "TORCHELASTIC_RUN_ID=r/MASTER_PORT=5"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR=h MASTER_PORT=5", "MASTER_ADDR=h/MASTER_PORT=5"),
        ({"rank": 0, "world_size": 2}, "", None),
    ],
)
def test_ranks_of_a_host_meet_by_what_names_their_launch(values, text, point) -> None:
    assert topology.resolve(config.parse(values), environment(text)).meeting_point == point


@dataclasses.dataclass
class Ranks:
    """Ranks of a group, each a thread, that meet in a store in memory. Hosts are letters, and so are machines."""

    hosts: str
    machines: str = ""  # the hosts where empty
    num_others: int = 0  # ranks of the launch that are not in the group
    store: Any = dataclasses.field(default_factory=torch.distributed.HashStore)

    def group(self, rank: int, *, is_given: bool = False) -> RankGroup:
        world_size = len(self.hosts)
        return RankGroup(
            rank,
            world_size,
            launch=(rank, world_size + self.num_others),
            host=self.hosts[rank],
            machine=(self.machines or self.hosts)[rank],
            store=self.store,
            handle=None,
            is_given=is_given,
        )

    def meet(
        self, rank: int, launched: tuple[int, int] | None, timeout_s: float = 20.0
    ) -> process_groups.Meeting:
        return process_groups.meet(self.group(rank), launched=launched, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("text", "values", "is_given", "place", "launched"),
    [
        ("", {}, False, (3, 4, 2, 3), None),
        (TORCHRUN, {}, False, (3, 4, 2, 3), (1, 2)),
        (TORCHRUN, {"rank": 3, "world_size": 4}, False, (3, 4, 2, 3), (1, 2)),
        (f"{TORCHRUN[:-1]}3".replace("LOCAL_RANK=1", "LOCAL_RANK=0"), {}, False, (3, 4, 0, 3), (0, 3)),
        # Half set or of another launch: a higher source is complete.
        (f"WORLD_SIZE=2 {PET} PMI_SIZE=4 MV2_COMM_WORLD_SIZE=4", {}, False, (3, 4, 2, 3), None),
        (SRUN, {}, False, (3, 4, 2, 3), None),
        (f"RANK=0 WORLD_SIZE=2 {OPEN_MPI}", {"rank": 3, "world_size": 4}, False, (3, 4, 2, 3), None),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", {}, True, (3, 4, 2, 3), None),
        ("", {"local_rank": 1, "local_world_size": 2}, False, (3, 4, 1, 2), (1, 2)),
        ("", {"local_world_size": 2}, False, (3, 4, 1, 2), None),
    ],
)
def test_a_process_group_gives_the_rank(text, values, is_given, place, launched) -> None:
    """Rank 3 shares a host with ranks 1 and 2, whose launcher numbers them as 1 and 2 of 3."""
    ranks = Ranks("abbb")
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(ranks.meet, rank, (rank, 3)) for rank in range(3)]
        group = ranks.group(3, is_given=is_given)
        found = topology.resolve(config.parse(values), environment(text), group)
    assert {found.meeting_point} == {other.result().point for other in others}
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place
    assert found.launched == launched and not found.is_part


@pytest.mark.parametrize(
    ("text", "values", "is_given", "said"),
    [
        (
            "RANK=0 WORLD_SIZE=2",
            {},
            False,
            "RANK=0 and WORLD_SIZE=2 disagree with torch.distributed's default process group, which makes this process "
            r"rank 3 of 4\. .* process_group=torch\.distributed\.group\.WORLD",
        ),
        (
            "",
            {"rank": 0, "world_size": 1},
            False,
            r"sets rank=0 and world_size=1, but .* default process group makes this process rank 3 of 4\. Remove rank "
            "and world_size from the configuration, or pass",
        ),
        (
            "",
            {"world_size": 1},
            True,
            "sets world_size=1, but the group that was passed as process_group makes",
        ),
        (TORCHRUN, {"rank": 2}, False, "sets rank=2, but torch.distributed's"),
    ],
)
def test_sources_that_contradict_a_process_group_are_named(text, values, is_given, said) -> None:
    group = Ranks("aaaa").group(3, is_given=is_given)
    with pytest.raises(ConfigError, match=said):
        topology.resolve(config.parse(values), environment(text), group)


def test_ranks_of_a_part_of_the_launch_know_that_there_are_more() -> None:
    group = dataclasses.replace(Ranks("a").group(0, is_given=True), launch=(3, 4))
    found = topology.resolve(config.parse({}), environment(TORCHRUN), group)
    assert found == topology.Topology(0, 1, 0, 1)
    assert found.is_part and found.launched == (1, 2)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (torch.distributed.GroupMember.NON_GROUP_MEMBER, "this process is not in the group that was passed"),
        ("world", "process_group is a str. Pass a process group of torch.distributed"),
    ],
)
def test_what_is_no_group_of_this_process_is_refused(group, said) -> None:
    with pytest.raises(ConfigError, match=said):
        process_groups.find_group(group, host="a", machine="b")


def test_a_group_is_the_one_that_was_given_else_the_default_one(own_process_group) -> None:
    assert process_groups.find_group(None, host="a", machine="b") is None
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    default, other = torch.distributed.group.WORLD, torch.distributed.new_group([0])
    for given, expected in ((None, default), (other, other)):
        found = process_groups.find_group(given, host="a", machine="b")
        assert found is not None and found.handle is expected and found.is_given == (given is not None)
        assert (found.rank, found.world_size, found.launch) == (0, 1, (0, 1))
        assert (found.host, found.machine) == ("a", "b")


def meetings(hosts: str, launched: list[Any], timeout_s: float = 20.0, **more: Any) -> list[Any]:
    """Return what the ranks of a group agree on; ``-`` is a rank that stays away."""
    ranks = Ranks(hosts, **more)
    with ThreadPoolExecutor(len(hosts)) as pool:
        runs = [
            pool.submit(ranks.meet, rank, launched[rank], timeout_s)
            for rank in range(len(hosts))
            if hosts[rank] != "-"
        ]
        return [each.exception() or each.result() for each in runs]


def test_ranks_of_a_group_are_numbered_by_host() -> None:
    found = meetings("abab", [None] * 4)
    assert len({meeting.point for meeting in found}) == 1
    assert [meeting.local for meeting in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    # A launcher's numbers count where all ranks of a host have them.
    told = [(1, 2), (0, 2), (0, 2), (1, 2)]
    assert [meeting.local for meeting in meetings("aabb", told)] == told
    found = meetings("aaab", [None, *told[1:]])
    assert [meeting.local for meeting in found] == [(0, 3), (1, 3), (2, 3), (0, 1)]
    assert meetings("a", [None])[0].local == (0, 1)


def test_ranks_of_two_launchers_on_one_host_are_numbered_together() -> None:
    found = meetings("aaaa", [(0, 2), (1, 2)] * 2)
    assert [meeting.local for meeting in found] == [(rank, 4) for rank in range(4)]


def test_hosts_on_one_machine_share_its_cores() -> None:
    found = meetings("abc", [(0, 1)] * 3, machines="mmn")
    assert [meeting.local for meeting in found] == [(0, 1)] * 3
    assert [meeting.on_machine for meeting in found] == [(0, 2), (1, 2), (0, 1)]


def test_a_part_of_a_launch_leaves_cores_to_the_other_ranks() -> None:
    """Ranks 0 and 3 of the four that a launcher started here."""
    found = meetings("aa", [(0, 4), (3, 4)], num_others=2)
    assert [meeting.on_machine for meeting in found] == [(0, 4), (3, 4)]
    assert [meeting.local for meeting in found] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("hosts", "missing"), [("a-", "rank 1 of the"), ("-a", "a rank of the"), ("-aa", "a rank")]
)
def test_ranks_that_stay_away_from_a_group_are_missed(hosts, missing) -> None:
    for error in meetings(hosts, [None] * 3, timeout_s=0.1):
        assert isinstance(error, CommunicationError)
        assert str(error).startswith(missing) and "timeout_s=0.1 seconds. Call it on every rank" in str(error)


def test_ranks_of_a_group_meet_again_after_they_missed_each_other() -> None:
    ranks = Ranks("aa")
    with pytest.raises(CommunicationError):
        ranks.meet(0, None, timeout_s=0.1)
    points = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            found = list(pool.map(ranks.meet, range(2), [None, None]))
            assert found[0].point == found[1].point
            points.append(found[0].point)
    assert points[0] != points[1]


def test_processes_of_one_host_have_one_identity() -> None:
    code = "from zerobench.host.identity import host_identity; print(host_identity())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == host_identity()
    _, net, pid = host_identity().split(" ")
    assert net.startswith("net:[") and pid.startswith("pid:[")


def test_a_host_that_hides_what_the_kernel_tells_goes_by_its_name(tmp_path) -> None:
    assert host_identity(tmp_path) == f"{platform.node()} net pid"
    assert machine_identity(tmp_path, has_quota=False) == platform.node()


def test_a_name_makes_a_host_of_its_own_on_the_same_machine(monkeypatch) -> None:
    before = read_host_facts()
    monkeypatch.setenv("ZEROBENCH_HOST", "left")
    named = read_host_facts()
    assert named.identity == f"{before.identity} left" and named.machine == before.machine


def test_containers_with_a_limit_of_cpu_time_are_machines_of_their_own() -> None:
    kernel = machine_identity(has_quota=False)
    assert kernel and machine_identity(has_quota=True).startswith(f"{kernel} pid:[")


@pytest.mark.parametrize(
    ("given", "missing"), [({}, "MASTER_ADDR and MASTER_PORT are"), ({"MASTER_ADDR": "h"}, "MASTER_PORT is")]
)
def test_c10d_names_the_address_that_it_lacks(given, missing) -> None:
    with pytest.raises(ConfigError, match=f"{missing} not set: start the ranks with torchrun"):
        made(communicator="c10d", world_size=2, environment=given)


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_ranks_of_one_host_on_cpu_share_memory(kind: str) -> None:
    communicators = made(communicator=kind)
    assert communicators.kind == communicators.gather.kind == communicators.reduce.kind == "shm"


@pytest.mark.parametrize("kind", ["nccl", "peer"])
def test_what_moves_memory_of_gpus_needs_one(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' moves memory of GPUs"):
        made(communicator=kind)


def test_one_process_needs_no_address_to_meet_at() -> None:
    found = made(communicator="c10d")
    try:
        assert found.gather.exchange(b"word") == b"word"
    finally:
        found.close()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_what_moves_host_memory_serves_no_gpu(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' moves host memory"):
        made(device=object(), communicator=kind)


def test_shm_connects_one_host_only() -> None:
    with pytest.raises(ConfigError, match="spread over several"):
        made(communicator="shm", world_size=4, local_world_size=2)


def test_peer_connects_one_host_only() -> None:
    with pytest.raises(ConfigError, match="GPUs of one host, but 4 ranks are spread over several"):
        made(device=object(), communicator="peer", world_size=4, local_world_size=2)


def test_a_communicator_that_was_given_away_is_gone() -> None:
    from zerobench.errors import StateError

    core = _native.load()
    comm = made().gather
    capsule = core.release_communicator(comm)
    with pytest.raises(StateError, match="given to an engine"):
        comm.barrier()
    adopted = core.adopt_communicator(capsule)
    assert adopted.exchange(b"word") == b"word"
    with pytest.raises(StateError):
        core.adopt_communicator(capsule)
    with pytest.raises(ValueError, match="expected what the other module made"):
        core.adopt_communicator(object())
    adopted.abort("enough")
    assert adopted.poisoned() == "rank 0 aborted: enough"
