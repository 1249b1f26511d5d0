"""Bound of a row over its network: compute, latency, bandwidth or its host, and what would move it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerobench.host.network import NATIVE
from zerobench.report.network_facts import (
    COMPUTE,
    bytes_by_collective,
    collectives_of,
    link_of,
    network_of,
    step_parts,
)
from zerobench.report.network_model import Costs
from zerobench.report.network_predictions import Case, break_even
from zerobench.results.schema import Row
from zerobench.results.sizes import KIB, bytes_text, ms_text

SMALL_MESSAGE = 64 * KIB
"""Of an unknown network, the mean bytes of a call below which latency is taken for what it waits for."""

SLOWEST, FASTEST = 1e6 / 8, 1e12 / 8
"""Bytes a second of the networks that sentences are about: 1 Mbit/s to 1 Tbit/s."""

Bound = Literal["compute", "latency", "bandwidth", "host"]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    bound: Bound
    sentence: str


def bottleneck(row: Row, costs: Costs) -> Bottleneck | None:
    """Return the largest part of a row's step and what would make it smaller, or None for a row without a time."""
    parts = step_parts(row)
    if parts is None:
        return None
    shares = {"compute": parts.compute + parts.bubble, "network": parts.network, "host": parts.host}
    largest = max(shares, key=lambda part: shares[part])
    where = row.strategy if network_of(row) == NATIVE else f"{row.strategy} at {network_of(row)}"
    share = 100 * shares[largest] / parts.step
    if largest == "compute":
        return Bottleneck(bound="compute", sentence=_compute_text(where, row, share))
    if largest == "host":
        return Bottleneck(bound="host", sentence=_host_text(where, row, share))
    if _waits_for_latency(row, costs):
        text = (
            f"{where} is bound by latency: {share:.0f} % of its step waits for {costs.rounds:.0f} messages that "
            f"follow one another, {bytes_text(int(costs.bytes))} in all. Fewer and larger messages would make it "
            "faster: larger units or buckets, a larger batch, or more --grad-accum where micro-batches are not "
            "reduced one by one."
        )
        return Bottleneck(bound="latency", sentence=text)
    return Bottleneck(bound="bandwidth", sentence=_bandwidth_text(where, row, costs, share))


def _waits_for_latency(row: Row, costs: Costs) -> bool:
    link = link_of(row)
    if link is not None:
        return link.latency_s * costs.rounds > costs.bytes / link.data_bytes_per_s
    calls = sum(one.calls or 1 for one in collectives_of(row))
    return bool(calls) and costs.bytes / calls < SMALL_MESSAGE


def _compute_text(where: str, row: Row, share: float) -> str:
    parts = step_parts(row)
    assert parts is not None
    largest = max(COMPUTE, key=lambda phase: (row.phases_ms or {}).get(phase, 0.0))
    text = f"{where} is bound by compute: {share:.0f} % of its step"
    if row.phases_ms:
        text += f", most of it {largest}"
    if parts.bubble > parts.step / 10:
        text += f"; {100 * parts.bubble / parts.step:.0f} % is the bubble, which more --micro-batches make smaller"
    gain = 100 * parts.network / parts.step
    return f"{text}. A faster network would shorten the step by at most {gain:.0f} %; use a faster device or --compile."


def _host_text(where: str, row: Row, share: float) -> str:
    phases = row.phases_ms or {}
    if phases.get("exposed_offload", 0.0) + phases.get("exposed_io", 0.0) > phases.get("host_bound", 0.0):
        return (
            f"{where} is bound by its host: {share:.0f} % of its step waits for offloaded state. Less --offload "
            "or a faster link or disk would make it faster."
        )
    return (
        f"{where} is bound by its host: in {share:.0f} % of its step the device waits for work. --compile block "
        "or a larger batch would make it faster."
    )


def _bandwidth_text(where: str, row: Row, costs: Costs, share: float) -> str:
    moved = bytes_by_collective(row)
    name = next(iter(moved), "collectives")
    text = (
        f"{where} is bound by bandwidth: {share:.0f} % of its step waits for {bytes_text(int(costs.bytes))} a step, "
        f"most of it {name}."
    )
    link, parts = link_of(row), step_parts(row)
    assert parts is not None
    fewer = "fewer bytes by a lower precision" if row.settings.precision == "fp32" else "fewer bytes"
    if link is None:
        return f"{text} A faster network or {fewer} would make it faster."
    gain_ms = costs.step_ms(link) - costs.step_ms(replace(link, bits_per_s=2 * link.bits_per_s))
    if gain_ms <= 0:
        return (
            f"{text} By the model, that time is spent waiting for slower ranks, so a faster network does not "
            "help."
        )
    return (
        f"{text} Twice the bandwidth, or half the bytes, would take {ms_text(gain_ms)} off its "
        f"{ms_text(parts.step)}."
    )


def bandwidth_text(bytes_per_s: float) -> str:
    """Return such as "1.2 Gbit/s"."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def break_even_text(case: Case, base: Case) -> str:
    """Return at which bandwidths a strategy is faster than the baseline, by the model and without latency."""
    names = f"{case.strategy} against {base.strategy}"
    mine, others = case.costs, base.costs
    every = break_even(mine, others)
    fast = mine.compute_ms + mine.native_ms < others.compute_ms + others.native_ms
    # Those of no real network flip which one is faster, and are not told.
    fast ^= sum(bandwidth > FASTEST for bandwidth in every) % 2 == 1
    found = [bandwidth for bandwidth in every if SLOWEST <= bandwidth <= FASTEST]
    if not found:
        return f"{names}: {'faster' if fast else 'slower'} at every bandwidth."
    texts = []
    for bandwidth in found:  # from fast networks to slow ones
        texts.append(f"{'faster' if fast else 'slower'} above {bandwidth_text(bandwidth)}")
        fast = not fast
    texts.append(f"{'faster' if fast else 'slower'} below {bandwidth_text(found[-1])}")
    return f"{names}: {', '.join(texts)}."


def baseline_case(found: Sequence[Case], case: Case, baseline: str) -> Case | None:
    """Return plain data parallelism at the same work, or None where it was not measured."""
    return next((other for other in found if other.strategy == baseline and other.work == case.work), None)
