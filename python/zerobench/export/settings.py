"""A row's settings as strategies take them, so that an export says what was measured. Imports torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from zerobench.errors import DataError
from zerobench.results.schema import Row
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import GIB
from zerobench.strategies.base import OptimizerSettings, StrategySettings
from zerobench.strategies.catalogue import known_facts


def strategy_settings(row: Row) -> StrategySettings:
    """Return the settings of rank 0, on one host."""
    settings = row.settings
    read = {field.name for field in fields(StrategySettings)}
    same = {key: getattr(settings, key) for key in SETTINGS if key in read}
    own: dict[str, Any] = {
        "rank": 0,
        "local_rank": 0,
        "local_world_size": settings.world_size,
        "rendezvous": "",
        "optimizer": OptimizerSettings(**settings.optimizer),
        "nvme_paths": tuple(settings.nvme_paths),
        "host_memory_bytes": share_bytes(settings.host_memory_gib, settings.world_size),
        "device_memory_bytes": share_bytes(settings.device_memory_gib, 1),
    }
    return StrategySettings(**{**same, **own})


def share_bytes(gib: float | None, num: int) -> int | None:
    return None if gib is None else round(gib * GIB) // num


def zero_stage(row: Row) -> int:
    """Return the ZeRO stage whose division of state the row has. Raises DataError where it has none."""
    facts = known_facts(row.strategy)
    if facts.stage is not None:
        return facts.stage
    if facts.replicates:
        return 0
    raise DataError(
        f"row {row.name} ({row.strategy}) has no ZeRO stage: name a row of another strategy, or export it --to torchrun"
    )
