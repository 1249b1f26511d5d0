"""Which CPUs each of a machine's ranks takes: decided from what is known of all of them, so that every rank decides
alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from zerobench.host.numa import ranges_text

Nodes = Mapping[int, Sequence[int]]
"""CPUs by NUMA node."""


class RankFacts(NamedTuple):
    """Facts that one of a machine's ranks reports about itself."""

    allowed: Hashable  # stands for the CPUs that it may run on: equal where they are
    has_gpu: bool = False
    gpu_node: int | None = None  # None: the machine does not say


class CpuShare(NamedTuple):
    """CPUs of one rank."""

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]  # that they are on; none where the kernel lists none
    reason: str  # why these

    def __str__(self) -> str:
        where = f"node{'s' * (len(self.nodes) > 1)} {ranges_text(self.nodes)}" if self.nodes else "CPUs"
        return f"{where}: {ranges_text(self.cpus)} ({self.reason})"


def share_of_rank(place: int, ranks: Sequence[RankFacts], nodes: Nodes, allowed: Sequence[int]) -> CpuShare:
    """A rank's part of the CPUs ``allowed`` to it, in an order that keeps cores together: of its GPU's node, or of the
    node that is its turn, or else of all of them. ``ranks``: of the machine, in their order there.

    Ranks that a launcher has bound to CPUs of their own share only with those of the same CPUs. Where nodes would be
    left to nobody, ranks share all of them: an update takes what memory bandwidth there is.
    """
    group = [rank for rank in range(len(ranks)) if ranks[rank].allowed == ranks[place].allowed]
    index = group.index(place)
    if len(group) < len(ranks) and len(group) == 1:
        return made(allowed, nodes, "bound to them by its launcher")
    usable = {node: here for node, cpus in nodes.items() if (here := [cpu for cpu in allowed if cpu in cpus])}
    if len(usable) < 2:
        return made(part_of(sorted(allowed), index, len(group)), nodes, "even share")
    members = [ranks[rank] for rank in group]
    if all(member.has_gpu for member in members):
        places = [-1 if member.gpu_node is None else member.gpu_node for member in members]
        if set(places) == set(usable):
            return made(part_of_node(index, places, usable), nodes, "node of its GPU")
        unknown = not all(place in usable for place in places)
        why = (
            "not every GPU's node is known and has CPUs for ranks"
            if unknown
            else "some nodes have no rank's GPU"
        )
        reason = f"even share: {why}"
    elif not any(member.has_gpu for member in members) and are_spread(len(members), usable):
        return made(part_of_node(index, spread(usable, len(members)), usable), nodes, "node that is its turn")
    else:
        reason = f"even share: {len(members)} ranks do not fill {len(usable)} nodes evenly"
    return made(part_of(sorted(allowed), index, len(group)), nodes, reason)


def are_spread(rank_num: int, usable: Nodes) -> bool:
    """Return whether ranks without GPUs fill nodes with equal shares."""
    return rank_num % len(usable) == 0 and len({len(cpus) for cpus in usable.values()}) == 1


def spread(nodes: Nodes, rank_num: int) -> list[int]:
    """The node of each of a machine's CPU ranks: neighbours on one node, nodes filled evenly."""
    names = list(nodes)
    return [names[rank * len(names) // rank_num] for rank in range(rank_num)]


def part_of_node(local_rank: int, places: Sequence[int], nodes: Nodes) -> list[int]:
    """Return a rank's part of the CPUs of its node, which the ranks there share; empty if the node has no CPUs.
    ``places``: the node of each rank."""
    together = [rank for rank, place in enumerate(places) if place == places[local_rank]]
    cpus = nodes.get(places[local_rank], [])
    return part_of(cpus, together.index(local_rank), len(together)) if cpus else []


def part_of(cpus: Sequence[int], index: int, num: int) -> list[int]:
    """One of ``num`` parts that follow each other and differ by one CPU at most; at least one CPU."""
    begin = len(cpus) * index // num
    return list(cpus[begin : max(begin + 1, len(cpus) * (index + 1) // num)])


def made(cpus: Sequence[int], nodes: Nodes, reason: str) -> CpuShare:
    """The share of these CPUs, with the nodes that they are on."""
    on = tuple(node for node, its in nodes.items() if not set(its).isdisjoint(cpus))
    return CpuShare(tuple(sorted(cpus)), on, reason)
