"""A row's settings as strategies take them. Imports no torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from zerobench.results.settings import SETTINGS, Settings
from zerobench.results.sizes import GIB
from zerobench.strategies.base import OptimizerSettings, StrategySettings


def row_settings(settings: Settings, *, host_rank_num: int, **own: Any) -> StrategySettings:
    """Return a row's settings for a strategy. ``own`` are those of a rank or a pass, and win over the row's.
    ``host_rank_num`` ranks share the memory of their host."""
    read = {field.name for field in fields(StrategySettings)}
    same = {key: getattr(settings, key) for key in SETTINGS if key in read}
    converted = {
        "optimizer": OptimizerSettings(**settings.optimizer),
        "nvme_paths": tuple(settings.nvme_paths),
        "host_memory_bytes": _bytes_of(settings.host_memory_gib, shared_by=host_rank_num),
        "device_memory_bytes": _bytes_of(settings.device_memory_gib),
    }
    return StrategySettings(**{**same, **converted, **own})


def _bytes_of(gib: float | None, *, shared_by: int = 1) -> int | None:
    return None if gib is None else round(gib * GIB) // shared_by
