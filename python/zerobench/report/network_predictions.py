"""Predictions of the network model for results: step times by hosts and network, its error, and where strategies break
even."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zerobench.host.network import NATIVE, Link, parse_network
from zerobench.report.network_facts import network_of, speed_of
from zerobench.report.network_model import Costs, costs_of
from zerobench.report.speed_conclusions import series
from zerobench.results.schema import Row
from zerobench.results.settings import Changes, Settings, settings_that_change
from zerobench.results.stats import median

HOSTS = (2, 4, 8, 16, 64)
_VARYING = ("network", "world_size", "threads_per_rank")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step time by the model, next to the measured one where there is one."""

    network: str
    hosts: int
    predicted_ms: float
    measured_ms: float | None = None
    unseen_ms: float | None = None
    """Of a measured point: predicted without it, so that the model did not see what it is compared with."""

    @property
    def error(self) -> float | None:
        """Relative error on the measured step time, by the model that did not see it."""
        if self.measured_ms is None or self.unseen_ms is None:
            return None
        return abs(self.unseen_ms - self.measured_ms) / self.measured_ms


@dataclass(frozen=True, kw_only=True)
class Case:
    """The rows of one strategy that differ in their network and in the number of hosts alone."""

    rows: list[Row]
    costs: Costs

    @property
    def strategy(self) -> str:
        return self.rows[0].strategy

    @property
    def settings(self) -> Settings:
        return self.rows[0].settings

    @property
    def work(self) -> str:
        """Text that is equal for cases that train the same model on the same tokens in a step."""
        keys = settings_that_change(Changes.RESULT | Changes.FLOOR)
        return repr([*(getattr(self.settings, key) for key in keys), self.costs.hosts])


def cases(rows: Iterable[Row]) -> list[Case]:
    """Return the cases of rows on two ranks or more, each with the costs that it has on its fewest hosts."""
    found = []
    for group in series(rows, *_VARYING):
        several = [row for row in group if row.settings.world_size > 1]
        costs = costs_of(_on_fewest_hosts(several))
        if costs is not None:
            found.append(Case(rows=several, costs=costs))
    return found


def _on_fewest_hosts(rows: Sequence[Row]) -> list[Row]:
    fewest = min((row.settings.world_size for row in rows), default=0)
    return [row for row in rows if row.settings.world_size == fewest]


def predictions(
    case: Case, *, hosts: Sequence[int] = HOSTS, networks: Sequence[str] = ()
) -> list[Prediction]:
    """Return the step times over each measured network, and over further ones, by number of hosts.

    The machine's own network has no known speed, so it has measured points only."""
    asked = dict.fromkeys([*(network_of(row) for row in case.rows), *networks])
    links = {name: parse_network(name, source="network") for name in asked if name != NATIVE}
    return [
        _prediction(case, name, link, number)
        for name, link in sorted(links.items(), key=lambda item: -speed_of(item[0]))
        for number in sorted({*hosts, *(row.settings.world_size for row in case.rows)})
        if number % case.costs.stages == 0
    ]


def _prediction(case: Case, name: str, link: Link | None, hosts: int) -> Prediction:
    row = next(
        (row for row in case.rows if network_of(row) == name and row.settings.world_size == hosts), None
    )
    unseen = None
    if row is not None:
        unseen = costs_of(_on_fewest_hosts([other for other in case.rows if other is not row]))
    return Prediction(
        network=name,
        hosts=hosts,
        predicted_ms=case.costs.on_hosts(hosts).step_ms(link),
        measured_ms=row.step_time_ms.median if row is not None and row.step_time_ms is not None else None,
        unseen_ms=unseen.on_hosts(hosts).step_ms(link) if unseen is not None else None,
    )


def errors(found: Iterable[Prediction]) -> tuple[float, float] | None:
    """Return the median and the worst relative error on measured points, or None where there are none."""
    known = [prediction.error for prediction in found if prediction.error is not None]
    return (median(known), max(known)) if known else None


def break_even(first: Costs, second: Costs, *, latency_s: float = 0.0) -> list[float]:
    """Return the bandwidths, in bytes a second, at which two strategies take equal time, the fastest first.

    Step times are straight lines of 1 / bandwidth with one bend each, so between bends the difference is a line whose
    root is exact."""

    def difference(x: float) -> float:
        return _step_ms(first, x, latency_s) - _step_ms(second, x, latency_s)

    bends = sorted({0.0, *(bend for costs in (first, second) if (bend := _bend(costs, latency_s)) > 0)})
    found = []
    for low, high in pairwise([*bends, 2 * bends[-1] + 1.0]):
        begin, slope = difference(low), (difference(high) - difference(low)) / (high - low)
        root = low - begin / slope if slope else low
        is_last = low == bends[-1]
        if slope and low < root and (root <= high or is_last):
            found.append(1 / root)
    return found


def _step_ms(costs: Costs, x: float, latency_s: float) -> float:
    wire_ms = 1e3 * (costs.bytes * x + latency_s * costs.rounds)
    return costs.compute_ms + costs.native_ms + max(0.0, wire_ms - costs.overlap_ms)


def _bend(costs: Costs, latency_s: float) -> float:
    """Return 1 / bandwidth from which on the network shows."""
    if not costs.bytes:
        return 0.0
    return (costs.overlap_ms / 1e3 - latency_s * costs.rounds) / costs.bytes
