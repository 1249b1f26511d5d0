"""The CPUs that an engine's updates run on: the configuration's, or this rank's share of what the ranks of its host may
use, by their GPUs' NUMA nodes. Ranks tell each other what they know, so that all decide alike."""

from __future__ import annotations

import hashlib
import os
import platform
import struct
from typing import TYPE_CHECKING, NamedTuple

from zerobench.engine.config import Config
from zerobench.engine.topology import Topology
from zerobench.errors import ConfigError
from zerobench.host.cpu_shares import CpuShare, RankFacts, made, part_of, share_of_rank
from zerobench.host.identity import boot_id
from zerobench.host.numa import cores_together, lacks_node, node_of_pci_device, read_nodes

if TYPE_CHECKING:
    from zerobench._core import Communicator

_UNKNOWN_NODE = -1


class Told(NamedTuple):
    """What a rank tells every other one, of whatever host."""

    host: bytes
    allowed: bytes
    local_rank: int
    local_world_size: int
    has_gpu: int
    gpu_node: int

    def packed(self) -> bytes:
        """Equally long on all ranks."""
        return _MESSAGE.pack(*self)


_MESSAGE = struct.Struct("<16s16siiii")


def expect_usable(config: Config) -> None:
    """Raise ConfigError for CPUs of the configuration that this process may not use, and a NUMA node that is none."""
    if unknown := set(config.cpus or ()) - os.sched_getaffinity(0):
        raise ConfigError(f"cpus names CPU {min(unknown)}, which this process may not run on")
    node = config.offload_optimizer and config.offload_optimizer.numa_node
    if isinstance(node, int) and lacks_node(node):
        raise ConfigError(
            f"offload_optimizer.numa_node {node} is no NUMA node of this host: give one that `numactl --hardware` "
            "lists, or leave it out for that of this rank's CPUs"
        )


def rank_cpus(
    config: Config, topology: Topology, communicator: Communicator, *, gpu_bus_id: str | None
) -> CpuShare:
    """This rank's CPUs, on the node of its GPU where the host's ranks can be divided by nodes. Collective."""
    allowed = sorted(os.sched_getaffinity(0))
    node = node_of_pci_device(gpu_bus_id)
    index, num_ranks = topology.place_on_host
    mine = Told(
        host=_digest(f"{platform.node()} {boot_id()}"),
        allowed=_digest(str(sorted(config.cpus or allowed))),
        local_rank=index,
        local_world_size=num_ranks,
        has_gpu=gpu_bus_id is not None,
        gpu_node=_UNKNOWN_NODE if node is None else node,
    )
    everyone = [mine] if topology.world_size == 1 else tell(communicator, mine)
    nodes = read_nodes()
    if config.cpus:
        return made(config.cpus, nodes, "as configured")
    ranks = ranks_of_host(everyone, mine)
    if ranks is None:
        cpus = part_of(allowed, index, num_ranks)
        return made(cpus, nodes, "even share")
    return share_of_rank(index, ranks, nodes, cores_together(allowed))


def tell(communicator: Communicator, mine: Told) -> list[Told]:
    """What every rank tells, by rank. Collective."""
    together = communicator.exchange(mine.packed())
    return [Told(*fields) for fields in _MESSAGE.iter_unpack(together)]


def ranks_of_host(everyone: list[Told], mine: Told) -> list[RankFacts] | None:
    """Of this rank's host, by local rank; None where they are not the ranks that a launcher counted there, as with two
    containers on one host."""
    here = sorted((told for told in everyone if told.host == mine.host), key=lambda told: told.local_rank)
    if [told.local_rank for told in here] != list(range(mine.local_world_size)):
        return None
    return [
        RankFacts(
            allowed=told.allowed,
            has_gpu=bool(told.has_gpu),
            gpu_node=None if told.gpu_node == _UNKNOWN_NODE else told.gpu_node,
        )
        for told in here
    ]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
