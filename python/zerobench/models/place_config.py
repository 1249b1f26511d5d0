"""Models that a function of one's own makes, by ``package.module:function``. Imports neither torch nor the function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerobench.errors import ConfigError
from zerobench.models.config import make
from zerobench.models.measured import MeasuredConfig

_OPTIONS = ("dropout",)


class PlaceConfig(MeasuredConfig):
    """A model that the function at ``place`` makes, or that the ModelSource has which it returns."""

    place: str
    own_batches: bool = False  # its ModelSource makes them


def from_place(place: str, overrides: Mapping[str, Any] | None) -> PlaceConfig:
    """Return the configuration of the model that ``place`` names. Raises ConfigError for an option that only the
    function could follow."""
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    for key in given:
        if key not in _OPTIONS:
            raise ConfigError(
                f"model {place!r} is made by its function, which {key} does not reach: remove {key}, or name a "
                "function that makes the model with it"
            )
    return make(PlaceConfig, place, {"num_layers": 1, "place": place, "whole": True, **given})
