"""The CPUs that an engine's updates run on: the configuration's, or this rank's share of what the ranks of its machine
may use, by their GPUs' NUMA nodes. Ranks tell each other what they know, so that all decide alike."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, NamedTuple

from zerobench.engine.config import Config
from zerobench.engine.topology import Topology
from zerobench.errors import ConfigError
from zerobench.host.cpu_shares import CpuShare, RankFacts, made, part_of, share_of_rank
from zerobench.host.facts import HostFacts
from zerobench.host.numa import cores_together, lacks_node, node_of_pci_device, ranges_text, read_nodes

if TYPE_CHECKING:
    from zerobench._core import Communicator

_UNKNOWN_NODE = -1


class Told(NamedTuple):
    """Facts that a rank sends to all others, on any machine."""

    machine: bytes
    allowed: bytes
    place: int  # among the ranks of its machine
    num_ranks: int
    has_gpu: int
    gpu_node: int

    def packed(self) -> bytes:
        """Equally long on all ranks."""
        return _MESSAGE.pack(*self)


_MESSAGE = struct.Struct("<16s16siiii")


def expect_usable(config: Config, host: HostFacts) -> None:
    """Raise ConfigError for CPUs of the configuration that this process may not use, and a NUMA node that is none."""
    if unknown := set(config.cpus or ()) - set(host.cpus):
        raise ConfigError(
            f"cpus names CPU {min(unknown)}, on which this process may not run: choose from {ranges_text(host.cpus)}"
        )
    node = config.offload_optimizer and config.offload_optimizer.numa_node
    if isinstance(node, int) and lacks_node(node, host.sysfs):
        raise ConfigError(
            f"offload_optimizer.numa_node {node} is not a NUMA node of this host: give one that `numactl --hardware` "
            "lists, or remove it to use the node of this rank's CPUs"
        )


def rank_cpus(
    config: Config, topology: Topology, communicator: Communicator, host: HostFacts, *, gpu_bus_id: str | None
) -> CpuShare:
    """This rank's CPUs, on the node of its GPU where the machine's ranks can be divided by nodes. Collective."""
    allowed = list(host.cpus)
    node = node_of_pci_device(gpu_bus_id, host.sysfs)
    place, num_ranks = topology.place_on_machine
    mine = Told(
        machine=_digest(host.machine),
        allowed=_digest(str(sorted(config.cpus or allowed))),
        place=place,
        num_ranks=num_ranks,
        has_gpu=gpu_bus_id is not None,
        gpu_node=_UNKNOWN_NODE if node is None else node,
    )
    everyone = [mine] if topology.world_size == 1 else tell(communicator, mine)
    nodes = read_nodes(host.sysfs)
    if config.cpus:
        return made(config.cpus, nodes, "as configured")
    ranks = ranks_of_machine(everyone, mine)
    if ranks is None:
        cpus = part_of(allowed, place, num_ranks)
        return made(cpus, nodes, "even share")
    return share_of_rank(place, ranks, nodes, cores_together(allowed, host.sysfs))


def tell(communicator: Communicator, mine: Told) -> list[Told]:
    """Send ``mine`` to all ranks and return what every rank sent, by rank. Collective."""
    together = communicator.exchange(mine.packed())
    return [Told(*fields) for fields in _MESSAGE.iter_unpack(together)]


def ranks_of_machine(everyone: list[Told], mine: Told) -> list[RankFacts] | None:
    """Return the facts of this machine's ranks in their order, or None where its launchers counted ranks that are not
    in the engine."""
    here = sorted((told for told in everyone if told.machine == mine.machine), key=lambda told: told.place)
    if [told.place for told in here] != list(range(mine.num_ranks)):
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
