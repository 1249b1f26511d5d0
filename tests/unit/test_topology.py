"""Which communicators an engine gets, as far as that is decided before any are made."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zerobench import _native, config, topology  # noqa: E402
from zerobench.errors import CommunicationError, ConfigError  # noqa: E402
from zerobench.meeting import expect_route  # noqa: E402


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


@pytest.mark.parametrize(
    ("values", "environment", "place"),
    [
        ({}, {}, (0, 1, 0, 1)),
        ({"world_size": 4, "rank": 3}, {}, (3, 4, 3, 4)),
        ({"world_size": 4, "rank": 2, "local_world_size": 2}, {}, (2, 4, 0, 2)),
        ({}, {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}, (3, 6, 0, 3)),
        ({}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (1, 2, 1, 2)),
        ({"world_size": 1}, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, (0, 1, 0, 1)),
    ],
)
def test_what_a_configuration_leaves_open_the_environment_says(values, environment, place) -> None:
    found = topology.resolve(config.parse(values), environment)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place


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
