"""Rows over networks whose step times follow the model exactly, or as told."""

from __future__ import annotations

from report_samples import sample

from zerobench.host.network import parse_network
from zerobench.report import finish_rows, summarise
from zerobench.results.rows import tokens_per_step
from zerobench.results.schema import Collective, Results, Row

MB = 10**6


def moved(phase: str, name: str, *, mb: float, calls: int = 4, ms: float | None = None) -> Collective:
    return Collective(phase=phase, name=name, bytes=int(mb * MB), calls=calls, ms=ms)


def over_network(
    strategy: str,
    network: str,
    *,
    ms: float,
    collectives: list[Collective],
    phases: dict[str, float] | None = None,
    **settings,
) -> Row:
    """Return a row of the sample with a network and other figures. Without ``phases`` all of its step is compute."""
    found = next(found for found in sample().rows if found.strategy == strategy).model_copy(deep=True)
    found.settings = found.settings.model_copy(update={"network": network, "device": "cuda", **settings})
    found.step_time_ms = summarise([ms] * 8)
    found.tokens_per_s = tokens_per_step(found) / (ms / 1e3)
    found.collectives, found.phases_ms = collectives, phases
    found.name = "_".join([strategy, network, *(f"{key}{value}" for key, value in settings.items())])
    return found


def by_the_model(
    strategy: str,
    networks: list[str],
    *,
    compute: float,
    native: float,
    overlap: float,
    collectives: list[Collective],
    rounds: float,
    **settings,
) -> list[Row]:
    """Return rows of one strategy, in ms, that follow the model; ``rounds``: messages that follow one another."""
    rows = []
    for network in networks:
        link = parse_network(network, source="test")
        shown = native
        if link is not None:
            mb = sum(one.bytes for one in collectives)
            wire = 1e3 * (mb / link.data_bytes_per_s + rounds * link.latency_s)
            shown = native + max(0.0, wire - overlap)
        phases = {
            "forward": compute / 4,
            "backward": compute / 2,
            "optimizer": compute / 4,
            "exposed_communication": shown,
        }
        rows.append(
            over_network(
                strategy, network, ms=compute + shown, collectives=collectives, phases=phases, **settings
            )
        )
    return rows


def results_of(*rows: Row) -> Results:
    results = sample()
    results.rows = list(rows)
    finish_rows(results)
    return results
