"""Which communicators an engine gets, as far as that is decided before any are made."""

from __future__ import annotations

import errno
import os
import platform
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zerobench import _native  # noqa: E402
from zerobench.engine import config, process_groups, topology  # noqa: E402
from zerobench.errors import CommunicationError, ConfigError  # noqa: E402
from zerobench.host import identity as host_identity  # noqa: E402
from zerobench.host.meeting import expect_route  # noqa: E402


def test_ranks_meet_where_a_way_leads_to_one_of_the_addresses(monkeypatch: Any) -> None:
    places = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (host, 9)) for host in ("240.0.0.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    monkeypatch.setattr(socket, "socket", Probe)
    expect_route("two-addresses")
    del places[1]
    with pytest.raises(
        CommunicationError, match=r"cannot meet at one-address \(MASTER_ADDR\): .*`ip link set lo up`"
    ):
        expect_route("one-address")
    places.clear()
    expect_route("unknown")  # torch says more


class Probe:
    """A socket that finds no way to 240.0.0.1, whatever default route this machine has."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, place: tuple[str, int]) -> None:
        if place[0] == "240.0.0.1":
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))


def made(device: Any = None, **values: Any) -> topology.Communicators:
    parsed = config.parse({"world_size": 1, "rank": 0, **values})
    return topology.make_communicators(_native.load(), parsed, topology.resolve(parsed, {}), device)


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


class Group(torch.distributed.ProcessGroup):
    """A group that only knows its ranks, which meet in a store of their own."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.store = store

    def get_group_store(self) -> Any:
        return self.store


def in_group(monkeypatch: Any, rank: int, world_size: int, text: str, is_given: bool, values: Any) -> Any:
    """As `resolve` finds it on a rank of a default group whose other ranks are left out."""
    group = Group(torch.distributed.HashStore(), rank, world_size)
    monkeypatch.setattr(topology, "default_group", lambda: group)
    monkeypatch.setattr(topology, "meet", lambda group, local, timeout_s: ("point", *(local or (7, 8))))
    return topology.resolve(config.parse(values), environment(text), group if is_given else None)


@pytest.mark.parametrize(
    ("text", "values", "is_given", "place", "launched"),
    [
        ("", {}, False, (3, 4, 7, 8), None),
        (TORCHRUN, {}, False, (3, 4, 1, 2), (1, 2)),
        (TORCHRUN, {"rank": 3, "world_size": 4}, False, (3, 4, 1, 2), (1, 2)),
        # Half set or of another launch: a higher source is complete.
        (f"WORLD_SIZE=2 {PET} PMI_SIZE=4 MV2_COMM_WORLD_SIZE=4", {}, False, (3, 4, 7, 8), None),
        (SRUN, {}, False, (3, 4, 7, 8), None),
        (f"RANK=0 WORLD_SIZE=2 {OPEN_MPI}", {"rank": 3, "world_size": 4}, False, (3, 4, 7, 8), None),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", {}, True, (3, 4, 7, 8), None),
        ("", {"local_rank": 1, "local_world_size": 2}, False, (3, 4, 1, 2), (1, 2)),
        ("", {"local_world_size": 2}, False, (3, 4, 1, 2), None),
    ],
)
def test_a_process_group_gives_the_rank(monkeypatch, text, values, is_given, place, launched) -> None:
    found = in_group(monkeypatch, 3, 4, text, is_given, values)
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
def test_sources_that_contradict_a_process_group_are_named(monkeypatch, text, values, is_given, said) -> None:
    with pytest.raises(ConfigError, match=said):
        in_group(monkeypatch, 3, 4, text, is_given, values)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (torch.distributed.GroupMember.NON_GROUP_MEMBER, "this process is not in the group that was passed"),
        ("world", "process_group is a str. Pass a process group of torch.distributed"),
    ],
)
def test_what_is_no_group_of_this_process_is_refused(group, said) -> None:
    with pytest.raises(ConfigError, match=said):
        topology.resolve(config.parse({}), {}, group)


def meetings(hosts: str, locals: list[Any], monkeypatch: Any, timeout_s: float = 20.0) -> list[Any]:
    """Return what the ranks of a group, each a thread, agree on; hosts are letters, ``-`` is a rank that stays away."""
    here = threading.local()
    monkeypatch.setattr(process_groups, "host_identity", lambda: here.host)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
    store = torch.distributed.HashStore()

    def run(rank: int) -> Any:
        here.host = hosts[rank]
        group = Group(store, rank, len(hosts))
        return process_groups.meet(group, local=locals[rank], timeout_s=timeout_s)

    with ThreadPoolExecutor(len(hosts)) as pool:
        runs = [pool.submit(run, rank) for rank in range(len(hosts)) if hosts[rank] != "-"]
        return [each.exception() or each.result() for each in runs]


def test_ranks_of_a_group_are_numbered_by_host(monkeypatch) -> None:
    found = meetings("abab", [None] * 4, monkeypatch)
    assert len({meeting.point for meeting in found}) == 1
    assert [meeting[1:] for meeting in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    # A launcher's numbers count where all ranks have them.
    told = [(1, 2), (0, 2), (0, 2), (1, 2)]
    assert [meeting[1:] for meeting in meetings("aaaa", told, monkeypatch)] == told
    found = meetings("aaab", [None, *told[1:]], monkeypatch)
    assert [meeting[1:] for meeting in found] == [(0, 3), (1, 3), (2, 3), (0, 1)]
    assert meetings("a", [None], monkeypatch)[0][1:] == (0, 1)


@pytest.mark.parametrize(
    ("hosts", "missing"), [("a-", "rank 1 of the"), ("-a", "a rank of the"), ("-aa", "a rank")]
)
def test_ranks_that_stay_away_from_a_group_are_missed(monkeypatch, hosts, missing) -> None:
    for error in meetings(hosts, [None] * 3, monkeypatch, timeout_s=0.1):
        assert isinstance(error, CommunicationError)
        assert str(error).startswith(missing) and "timeout_s=0.1 seconds. Call it on every rank" in str(error)


def test_ranks_of_a_group_meet_again_after_they_missed_each_other(monkeypatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
    groups = [Group(torch.distributed.HashStore(), 0, 2)]
    groups.append(Group(groups[0].store, 1, 2))
    with pytest.raises(CommunicationError):
        process_groups.meet(groups[0], local=None, timeout_s=0.1)
    points = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            found = list(pool.map(lambda group: process_groups.meet(group, local=None, timeout_s=20), groups))
            assert found[0].point == found[1].point
            points.append(found[0].point)
    assert points[0] != points[1]


def test_a_backend_without_a_store_exchanges_objects(monkeypatch) -> None:
    def all_gather_object(facts: list[Any], mine: Any, group: Any) -> None:
        facts[:] = [mine | {"point": "of rank 0"}, mine]

    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "mpi")
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    assert process_groups.meet(Group(None, 1, 2), local=None, timeout_s=1) == ("of rank 0", 1, 2)


def test_processes_of_one_host_have_one_identity(monkeypatch) -> None:
    code = "from zerobench.host.identity import host_identity; print(host_identity())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == host_identity.host_identity()
    _, net, pid = host_identity.host_identity().split(" ")
    assert net.startswith("net:[") and pid.startswith("pid:[")
    monkeypatch.setattr(host_identity, "boot_id", lambda: "")
    assert host_identity.host_identity().startswith(platform.node())


@pytest.mark.parametrize(
    ("given", "missing"), [({}, "MASTER_ADDR and MASTER_PORT are"), ({"MASTER_ADDR": "h"}, "MASTER_PORT is")]
)
def test_c10d_names_the_address_that_it_lacks(monkeypatch, given, missing) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{missing} not set: start the ranks with torchrun"):
        made(communicator="c10d", world_size=2)


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_ranks_of_one_host_on_cpu_share_memory(kind: str) -> None:
    communicators = made(communicator=kind)
    assert communicators.kind == communicators.gather.kind == communicators.reduce.kind == "shm"


@pytest.mark.parametrize("kind", ["nccl", "peer"])
def test_what_moves_memory_of_gpus_needs_one(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' moves memory of GPUs"):
        made(communicator=kind)


def test_one_process_needs_no_address_to_meet_at(monkeypatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
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
