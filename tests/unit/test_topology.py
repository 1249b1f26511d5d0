"""Which communicators an engine gets, as far as that is decided before any are made."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zerobench import _native, config, topology  # noqa: E402
from zerobench.errors import ConfigError  # noqa: E402


def made(device: Any = None, **values: Any) -> topology.Communicators:
    parsed = config.parse({"world_size": 1, "rank": 0, **values})
    return topology.make_communicators(_native.load(), parsed, topology.resolve(parsed, {}), device)


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_ranks_of_one_host_on_cpu_share_memory(kind: str) -> None:
    communicators = made(communicator=kind)
    assert communicators.kind == communicators.gather.kind == communicators.reduce.kind == "shm"


@pytest.mark.parametrize("kind", ["nccl", "peer"])
def test_what_moves_memory_of_gpus_needs_one(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' moves memory of GPUs"):
        made(communicator=kind)


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
