"""A model of the step time over a network. docs/explain/network-model.md derives it.

A step is compute + native + max(0, bytes / bandwidth + latency x rounds - overlap).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerobench.host.network import Link
from zerobench.report.network_facts import (
    collectives_of,
    link_of,
    network_of,
    network_share,
    rounds,
    speed_of,
    step_parts,
    wire_share,
)
from zerobench.results.schema import Row
from zerobench.results.stats import median

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The calls of one collective in a step."""

    name: str
    full_bytes: float
    """Of the buffers that all ranks hold together; what a rank sends follows from their number."""
    calls: float
    among: Literal["hosts", "stages", "replicas"] = "hosts"
    """Who takes part: all hosts, the stages of one pipeline, or the replicas of one stage."""

    def bytes(self, ranks: int) -> float:
        """Return what each of so many ranks sends."""
        return self.full_bytes * wire_share(self.name, ranks)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """All that the model knows of a row: times of a step in milliseconds, and what it moves."""

    compute_ms: float
    native_ms: float
    """What collectives take on a network without limits: waiting for slower ranks, and copies."""
    overlap_ms: float
    """Time on the wire beside which the row computes."""
    hosts: int
    """Ranks, each a host of one device."""
    moved: tuple[Moved, ...]
    stages: int = 1
    """Of a pipeline."""

    @property
    def bytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(each.bytes(self._ranks(each)) for each in self.moved)

    @property
    def rounds(self) -> float:
        """Messages of a step that follow one another."""
        return sum(each.calls * rounds(each.name, self._ranks(each)) for each in self.moved)

    def _ranks(self, moved: Moved) -> int:
        ranks = {"hosts": self.hosts, "stages": self.stages, "replicas": self.hosts // self.stages}
        return ranks[moved.among]

    def wire_ms(self, link: Link) -> float:
        """Return the time that the step's messages take on a link."""
        return 1e3 * (self.bytes / link.data_bytes_per_s + link.latency_s * self.rounds)

    def step_ms(self, link: Link | None) -> float:
        """Return the step time over a link; None: over the machine's own network."""
        wire_ms = self.wire_ms(link) - self.overlap_ms if link is not None else 0.0
        return self.compute_ms + self.native_ms + max(0.0, wire_ms)

    def on_hosts(self, hosts: int) -> Costs:
        """Return the costs with another number of hosts, each with the same batch."""
        return replace(self, hosts=hosts)


def costs_of(rows: Sequence[Row]) -> Costs | None:
    """Return the costs from one strategy's rows that differ in their network alone, or None where no row tells.

    Compute is the median over rows whose profile tells it apart from the network, since rows are measured at different
    moments of the machine. The native time is that of the row over the machine's own network, zero where there is none.
    The overlap is the median of what the other rows were faster than their time on the wire."""
    measured = [row for row in rows if step_parts(row) is not None]
    if not measured:
        return None
    base = max(measured, key=lambda row: speed_of(network_of(row)))
    telling = [row for row in measured if row is base or network_share(row) is not None]
    parts = [found for row in telling if (found := step_parts(row)) is not None]
    own = step_parts(base)
    costs = Costs(
        compute_ms=median([found.step - found.network for found in parts]),
        native_ms=own.network if own is not None and link_of(base) is None else 0.0,
        overlap_ms=0.0,
        hosts=base.settings.world_size,
        moved=tuple(_moved_by(base)),
        stages=base.settings.pipeline_stages or 1,
    )
    overlaps = [hidden for row in measured if (hidden := _overlap_ms(costs, row)) is not None]
    return replace(costs, overlap_ms=median(overlaps)) if overlaps else costs


def _moved_by(row: Row) -> Iterable[Moved]:
    stages, ranks = row.settings.pipeline_stages or 1, row.settings.world_size
    for one in collectives_of(row):
        among: Literal["hosts", "stages", "replicas"] = "hosts"
        if stages > 1:
            among = "replicas" if (one.phase, one.name) == ("backward", "all_reduce") else "stages"
        share = wire_share(one.name, {"hosts": ranks, "stages": stages, "replicas": ranks // stages}[among])
        # Between hosts CPU ranks go over gloo, in which every rank reduces everything.
        is_reduced_by_all = row.settings.device == "cpu" and one.name == "reduce_scatter"
        if share:
            name = "all_reduce" if is_reduced_by_all else one.name
            yield Moved(name=name, full_bytes=one.bytes / share, calls=one.calls or 1, among=among)
    if 1 < stages == ranks and row.settings.parameter_count and row.dtypes:  # what replicas would add
        whole = row.settings.parameter_count * _ITEM_BYTES.get(row.dtypes.reduce, 4) / stages
        yield Moved(name="all_reduce", full_bytes=whole, calls=1, among="replicas")


def _overlap_ms(costs: Costs, row: Row) -> float | None:
    """Return the part of a row's time on the wire that its step does not show; None where it tells nothing."""
    link = link_of(row)
    assert row.step_time_ms is not None
    if link is None:
        return None
    wire_ms = costs.wire_ms(link)
    shown_ms = row.step_time_ms.median - costs.compute_ms - costs.native_ms
    if shown_ms <= 1e-9 * wire_ms:  # all of it is hidden, and perhaps more could be
        return None
    return min(max(wire_ms - shown_ms, 0.0), wire_ms)
