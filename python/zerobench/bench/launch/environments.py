"""Environment variables of a job's ranks: who they are, where they meet, what libraries read when they load.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from zerobench.bench.protocol.job import NUM_PASSES, Job
from zerobench.bench.protocol.place import MachinePlace
from zerobench.errors import Error
from zerobench.host.identity import HOST_VARIABLE
from zerobench.host.network import NETWORK_VARIABLE, parse_network
from zerobench.host.shaped_network import INTERFACE, ShapedNetwork, address_of
from zerobench.results.settings import Settings

# Ranks that pretend hosts share a machine, whose short cuts NCCL would find.
_NCCL_BY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
_PORTS = range(20000, 32000)  # below the ephemeral range, which outgoing connections take from


def free_ports(num_ports: int) -> list[int]:
    """TCP ports that nobody listens on now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == num_ports:
            return found
    raise Error(f"no {num_ports} free TCP ports among 200 tried from {_PORTS.start} to {_PORTS.stop - 1}")


def meeting_point(address: str) -> dict[str, str]:
    """Return the variables by which the ranks of a job find each other. Each pass has its own port: a process group
    made again on the same store can find the keys of the previous one and hang."""
    ports = free_ports(NUM_PASSES)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(ports[0]),
        "ZEROBENCH_PORTS": ",".join(map(str, ports)),
        "ZEROBENCH_RENDEZVOUS": uuid.uuid4().hex,
    }


def environments_of(job: Job) -> list[dict[str, str]]:
    """Return what the ranks of a job need to meet when all of them are on this machine."""
    if job.network_how is not None:
        return host_environments(job.num_ranks, job.settings, job.network_how)
    return local_environments(job.num_ranks)


def host_environments(
    world_size: int, settings: Settings, network_how: Literal["shaped", "paced"]
) -> list[dict[str, str]]:
    """Return what ranks need to meet that pretend to be of one host each, and so have one GPU each."""
    is_shaped = network_how == "shaped"
    interface = INTERFACE if is_shaped else "lo"
    shared = {
        **meeting_point(address_of(0) if is_shaped else "127.0.0.1"),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        NETWORK_VARIABLE: "" if is_shaped else settings.network,
        **(_NCCL_BY_SOCKETS if is_shaped else {}),
    }
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if settings.device == "cuda" else []
    return [
        {
            **shared,
            **rank_environment(
                rank,
                world_size,
                local_rank=0,
                local_world_size=1,
                machine=MachinePlace.of_one_launcher(rank, world_size),
            ),
            HOST_VARIABLE: f"host-{rank}",
            "NCCL_HOSTID": f"host-{rank}",
            **({"CUDA_VISIBLE_DEVICES": gpus[rank] if any(gpus) else str(rank)} if gpus else {}),
        }
        for rank in range(world_size)
    ]


@contextlib.contextmanager
def namespaces_of(job: Job) -> Iterator[Sequence[int]]:
    """Yield a file descriptor of each rank's network namespace; nothing where ranks stay in the command's."""
    link = parse_network(job.settings.network, source="--network")
    if job.network_how != "shaped" or link is None:
        yield ()
        return
    with ShapedNetwork(job.num_ranks, link) as network:
        yield network.namespaces


def local_environments(world_size: int) -> list[dict[str, str]]:
    """Return the environment of each rank of a job that runs on this host alone."""
    shared = meeting_point("127.0.0.1")
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # gloo else resolves the host's name, which laptops often cannot
    return [
        {**shared, **rank_environment(rank, world_size, local_rank=rank, local_world_size=world_size)}
        for rank in range(world_size)
    ]


def device_environment(device: str) -> dict[str, str]:
    """Return the variables that libraries read when they start on a rank: CPU ranks see no GPU, and NVLink multicast
    stays off."""
    return {"NCCL_NVLS_ENABLE": "0"} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}


def environment_of(job: Job) -> dict[str, str]:
    """A verifying rank's GPU computes the same bits every time."""
    environment = device_environment(job.settings.device)
    if job.verify and job.settings.device == "cuda":
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    return environment


def rank_environment(
    rank: int, world_size: int, *, local_rank: int, local_world_size: int, machine: MachinePlace | None = None
) -> dict[str, str]:
    """Return who a rank is. ``machine`` is left out where all ranks of its machine are of its host."""
    machine = machine or MachinePlace.of_one_launcher(local_rank, local_world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        **machine.environment(),
    }
