"""Which cores a rank runs on where ranks are bound to NUMA nodes: its share of the node that its device is on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerobench.bench.machine import ranges_text
from zerobench.bench.nvml import Nvml
from zerobench.errors import ConfigError

SYSFS = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class Binding:
    node: int
    cpus: tuple[int, ...]

    def __str__(self) -> str:
        return f"node {self.node}: {ranges_text(list(self.cpus))}"


def bind_rank(local_rank: int, *, local_world_size: int, gpu_uuids: Sequence[str] = ()) -> Binding:
    """Bind every thread of this process, and those to come, to this rank's share of its node. ``gpu_uuids``: by local
    rank, of ranks on GPUs. Raises ConfigError where the machine does not say what is near."""
    nodes = read_nodes(SYSFS)
    places = gpu_nodes(gpu_uuids, nodes) if gpu_uuids else spread(nodes, local_world_size)
    allowed = sorted(os.sched_getaffinity(0))
    binding = share_of(local_rank, places, nodes, cores_together(allowed, SYSFS))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), binding.cpus)
    return binding


def read_nodes(sysfs: Path) -> dict[int, list[int]]:
    """CPUs by node; nodes without CPUs are left out."""
    found = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        cpus = parse_list((folder / "cpulist").read_text())
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    if not found:
        raise ConfigError("--bind numa: the kernel lists no NUMA nodes here: leave it out")
    return dict(sorted(found.items()))


def spread(nodes: dict[int, list[int]], rank_num: int) -> list[int]:
    """The node of each of a host's CPU ranks: neighbours on one node, nodes filled evenly."""
    names = list(nodes)
    return [names[rank * len(names) // rank_num] for rank in range(rank_num)]


def gpu_nodes(uuids: Sequence[str], nodes: dict[int, list[int]]) -> list[int]:
    """The node of each GPU; of a host with one node, that one."""
    if len(nodes) == 1:
        return list(nodes) * len(uuids)
    nvml = Nvml()
    try:
        buses = [nvml.facts(uuid).get("pci_bus_id") for uuid in uuids]
    finally:
        nvml.close()
    return [node_of_pci_device(bus, nodes, SYSFS) for bus in buses]


def node_of_pci_device(bus_id: str | None, nodes: dict[int, list[int]], sysfs: Path) -> int:
    """``bus_id`` as the driver writes it, "00000000:1B:00.0", whose domain the kernel writes in four digits."""
    try:
        node = int((sysfs / "bus/pci/devices" / (bus_id or "")[-12:].lower() / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    if node not in nodes:
        raise ConfigError(
            f"--bind numa: the machine does not say which node the GPU {bus_id or 'of this rank'} is on: leave it out"
        )
    return node


def cores_together(cpus: Sequence[int], sysfs: Path) -> list[int]:
    """In an order in which the hardware threads of a core follow each other, so that no share halves a core."""

    def core(cpu: int) -> int:
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            return cpu
        return parse_list(text)[0]

    return sorted(cpus, key=lambda cpu: (core(cpu), cpu))


def share_of(
    local_rank: int, places: Sequence[int], nodes: dict[int, list[int]], allowed: Sequence[int]
) -> Binding:
    """The rank's part of its node's allowed CPUs, at least one. ``places``: the node of each local rank."""
    node = places[local_rank]
    cpus = [cpu for cpu in allowed if cpu in nodes[node]]
    if not cpus:
        raise ConfigError(f"--bind numa: this process may not run on any core of node {node}: leave it out")
    together = [rank for rank, place in enumerate(places) if place == node]
    index, count = together.index(local_rank), len(together)
    begin = len(cpus) * index // count
    end = max(begin + 1, len(cpus) * (index + 1) // count)
    return Binding(node=node, cpus=tuple(sorted(cpus[begin:end])))


def parse_list(text: str) -> list[int]:
    """ "0-3,8" as the kernel writes it."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
