"""NUMA nodes, cores and where devices hang, as the kernel shows them below /sys. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SYSFS = Path("/sys")


def read_nodes(sysfs: Path = SYSFS) -> dict[int, list[int]]:
    """CPUs by node; nodes without CPUs are left out. Empty where the kernel lists none, or a container hides them."""
    found = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_list((folder / "cpulist").read_text())
        except OSError:
            continue
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def lacks_node(number: int, sysfs: Path = SYSFS) -> bool:
    """Return whether the kernel lists nodes but not this one; a node that has only memory counts, too."""
    nodes = sysfs / "devices/system/node"
    return (nodes / "node0").exists() and not (nodes / f"node{number}").exists()


def node_of_pci_device(bus_id: str | None, sysfs: Path = SYSFS) -> int | None:
    """``bus_id`` as drivers write it, "00000000:1B:00.0", whose domain the kernel writes in four digits; None where the
    machine does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / (bus_id or "")[-12:].lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_together(cpus: Sequence[int], sysfs: Path = SYSFS) -> list[int]:
    """In an order in which the hardware threads of a core follow each other, so that no share halves a core."""

    def core(cpu: int) -> int:
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            return cpu
        return parse_list(text)[0]

    return sorted(cpus, key=lambda cpu: (core(cpu), cpu))


def parse_list(text: str) -> list[int]:
    """The kernel's "0-3,8" as numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def ranges_text(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as 0-2,5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
