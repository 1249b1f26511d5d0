"""A row's settings as strategies take them, so that an export says what was measured. Imports torch."""

from __future__ import annotations

from zerobench.bench.protocol.row_settings import row_settings
from zerobench.errors import DataError
from zerobench.results.schema import Row
from zerobench.strategies.base import StrategySettings
from zerobench.strategies.catalogue import known_facts


def strategy_settings(row: Row) -> StrategySettings:
    """Return the settings of rank 0, on one host."""
    num_ranks = row.settings.world_size
    return row_settings(
        row.settings,
        host_rank_num=num_ranks,
        rank=0,
        local_rank=0,
        local_world_size=num_ranks,
        rendezvous="",
    )


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
