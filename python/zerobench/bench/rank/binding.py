"""Which cores a rank runs on where ranks are bound to NUMA nodes: its share of the node that its device is on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerobench.errors import ConfigError
from zerobench.host.cpu_shares import Nodes, part_of_node, spread
from zerobench.host.numa import SYSFS, cores_together, node_of_pci_device, ranges_text, read_nodes
from zerobench.host.nvml import Nvml


@dataclass(frozen=True, kw_only=True)
class Binding:
    node: int
    cpus: tuple[int, ...]

    def __str__(self) -> str:
        return f"node {self.node}: {ranges_text(self.cpus)}"


def bind_rank(rank: int, *, num_ranks: int, gpu_uuids: Sequence[str] = ()) -> Binding:
    """Bind every thread of this process, and those to come, to this rank's share of its node. ``rank`` is one of the
    ``num_ranks`` ranks that share its cores, and ``gpu_uuids`` are theirs where they are on GPUs. Raises ConfigError
    where the machine does not say what is near."""
    nodes = known_nodes(SYSFS)
    places = gpu_nodes(gpu_uuids, nodes) if gpu_uuids else spread(nodes, num_ranks)
    allowed = sorted(os.sched_getaffinity(0))
    binding = share_of(rank, places, nodes, cores_together(allowed))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), binding.cpus)
    return binding


def known_nodes(sysfs: Path) -> dict[int, list[int]]:
    """Nodes with CPUs, of which there must be one."""
    found = read_nodes(sysfs)
    if not found:
        raise ConfigError("--bind numa: the kernel lists no NUMA nodes here: remove it")
    return found


def gpu_nodes(uuids: Sequence[str], nodes: dict[int, list[int]]) -> list[int]:
    """The node of each GPU; of a host with one node, that one."""
    if len(nodes) == 1:
        return list(nodes) * len(uuids)
    nvml = Nvml()
    try:
        buses = [nvml.facts(uuid).get("pci_bus_id") for uuid in uuids]
    finally:
        nvml.close()
    return [known_node(bus, nodes, SYSFS) for bus in buses]


def known_node(bus_id: str | None, nodes: Nodes, sysfs: Path) -> int:
    """The node of a GPU, which must be one of these."""
    node = node_of_pci_device(bus_id, sysfs)
    if node is None or node not in nodes:
        raise ConfigError(
            f"--bind numa: the machine does not say which node the GPU {bus_id or 'of this rank'} is on: remove it"
        )
    return node


def share_of(rank: int, places: Sequence[int], nodes: Nodes, allowed: Sequence[int]) -> Binding:
    """The rank's part of its node's allowed CPUs, at least one. ``places``: the node of each rank."""
    node = places[rank]
    usable = {name: [cpu for cpu in allowed if cpu in cpus] for name, cpus in nodes.items()}
    cpus = part_of_node(rank, places, usable)
    if not cpus:
        raise ConfigError(f"--bind numa: this process may not run on any core of node {node}: remove it")
    return Binding(node=node, cpus=tuple(sorted(cpus)))
