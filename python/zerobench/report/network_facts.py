"""Cost of a row's network, from the row alone: bytes, calls, shares and effective bandwidths."""

from __future__ import annotations

import math
from typing import NamedTuple

from zerobench.host.network import NATIVE, Link, parse_network
from zerobench.report.phases import phases_pct
from zerobench.results.schema import Collective, Row

WHOLE_STEP = "step"  # the phase of collectives of which only the sum over the step is known
COMPUTE = ("forward", "backward", "optimizer")
HOST = ("host_bound", "exposed_offload", "exposed_io")
NETWORK = "exposed_communication"


class Times(NamedTuple):
    """Parts of a row's median step in milliseconds; they add up to it."""

    compute: float
    network: float
    """Exposed: what nothing else was computed in."""
    host: float
    bubble: float
    """In which a pipeline's stage has nothing to do, by the formula of its schedule."""

    @property
    def step(self) -> float:
        return sum(self)


def network_of(row: Row) -> str:
    """Return the network that the row ran over, as ``--network`` names it."""
    return row.settings.network


def link_of(row: Row) -> Link | None:
    """Return the link of the row's network, or None where it is the machine's own."""
    return parse_network(network_of(row), source="network")


def speed_of(network: str | None) -> float:
    """Return the bits a second of a network by its name, infinite for the machine's own."""
    link = parse_network(network or NATIVE, source="network")
    return math.inf if link is None else link.bits_per_s


def collectives_of(row: Row) -> list[Collective]:
    """Return the row's collectives by phase, or those of the whole step where phases are not known."""
    if row.collectives is not None:
        return row.collectives
    moved = row.communication_by_collective or {}
    return [Collective(phase=WHOLE_STEP, name=name, bytes=bytes_) for name, bytes_ in moved.items() if bytes_]


def bytes_by_collective(row: Row) -> dict[str, int]:
    """Return the bytes that a rank moves in a step by collective, the largest first."""
    found: dict[str, int] = {}
    for one in collectives_of(row):
        found[one.name] = found.get(one.name, 0) + one.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def effective_bandwidth(collective: Collective) -> float | None:
    """Return bytes a second: what moved over the time that the rank was in the collective. None where that is unknown.

    What runs beside computing takes no time here, so the figure can be above the wire's."""
    if not collective.ms:
        return None
    return collective.bytes / (collective.ms / 1e3)


def rounds(name: str, ranks: int) -> int:
    """Return how many messages of a collective follow one another, which is how often it waits for the latency."""
    if name == "all_reduce":
        return 2 * (ranks - 1)
    return 1 if name == "point_to_point" else ranks - 1


def wire_share(name: str, ranks: int) -> float:
    """Return the bytes that a rank sends over those of the full buffer, for collectives that go around a ring."""
    passes = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}.get(name)
    if passes is None:
        return float(ranks - 1) if name == "exchange" else 1.0
    return passes * (ranks - 1) / ranks


def step_parts(row: Row) -> Times | None:
    """Return the parts of the median step, by the shares of the profiled pass; None for a row without a time.

    A pipeline's waits hold its bubble, which no network is to blame for."""
    if row.step_time_ms is None:
        return None
    step = row.step_time_ms.median
    shares = {phase: pct / 100 for phase, pct in phases_pct(row).items()}
    network = step * shares.get(NETWORK, 0.0)
    bubble = min(network, step * (row.bubble_formula_pct or 0.0) / 100)
    host = step * math.fsum(shares.get(phase, 0.0) for phase in HOST)
    return Times(compute=step - network - host, network=network - bubble, host=host, bubble=bubble)


def network_share(row: Row) -> float | None:
    """Return the share of the step in which the rank only waited for the network, or None where it is not known."""
    parts = step_parts(row)
    if parts is None or NETWORK not in (row.phases_ms or {}):
        return None
    return parts.network / parts.step
