"""How the networks of a comparison are made slower, and for which rows that cannot be. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from zerobench.bench.plan.options import CompareOptions
from zerobench.errors import ConfigError
from zerobench.host.network import Link, parse_network
from zerobench.host.shaped_network import why_not_shaped
from zerobench.results.settings import Settings
from zerobench.strategies.catalogue import FLOOR, OURS

How = Literal["shaped", "paced"]


class Networks:
    """The networks that ``--network`` names, and how ranks get them. ``is_given``: torchrun or srun started the ranks.

    Raises ConfigError for a network that cannot be, with what to do.
    """

    def __init__(
        self,
        options: CompareOptions,
        *,
        is_given: bool,
        why_not_shaped: Callable[[Link], str | None] = why_not_shaped,
    ) -> None:
        self._how: dict[str, How] = {}
        self._obstacles: dict[str, str] = {}  # to shaping, by network
        for network in options.network:
            link = parse_network(network, source="--network")
            if link is None:
                continue
            if is_given:
                raise ConfigError(
                    f"--network {network} makes a host of each rank, and torchrun or srun decides where ranks are: "
                    "remove --network, or start the comparison without them"
                )
            obstacle = None if options.network_how == "paced" else why_not_shaped(link)
            if obstacle and options.network_how == "shaped":
                raise ConfigError(f"--network-how shaped: {obstacle}; or use --network-how paced")
            if obstacle:
                self._obstacles[network] = obstacle
            self._how[network] = "paced" if obstacle or options.network_how == "paced" else "shaped"

    def how(self, strategy: str, settings: Settings) -> How | None:
        """Return how the row's network is made slower, None where the row sends nothing or has the native network."""
        if settings.world_size == 1 or strategy == FLOOR:
            return None
        return self._how.get(settings.network)

    def why_refused(self, strategy: str, settings: Settings) -> str | None:
        """Return why a row is skipped: pacing is part of zerobench's own communicators."""
        if self.how(strategy, settings) != "paced" or strategy in OURS:
            return None
        why = self._obstacles.get(settings.network)
        cure = f", which this machine cannot make: {why}" if why else ": use --network-how shaped"
        return (
            f"--network {settings.network} is paced, which reaches zerobench's own communicators only, and {strategy} "
            f"needs shaped links{cure}"
        )

    def warnings(self) -> list[str]:
        return [
            f"--network {network} is paced, not shaped: {why}" for network, why in self._obstacles.items()
        ]
