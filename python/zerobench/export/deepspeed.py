"""DeepSpeed's configuration file of a row: that of the rows of DeepSpeed, without what serves measuring alone."""

from __future__ import annotations

from typing import Any

from zerobench.export.document import Document, json_text
from zerobench.export.settings import strategy_settings, zero_stage
from zerobench.results.schema import Results, Row
from zerobench.strategies.catalogue import CATALOGUE, Tool, tool_of
from zerobench.strategies.deepspeed.config import adamw_parameters, deepspeed_config

_FOR_MEASURING = ("steps_per_print", "wall_clock_breakdown", "timers")


def deepspeed_values(row: Row) -> dict[str, Any]:
    """Return the configuration as a dictionary, with the optimizer in it."""
    settings = strategy_settings(row)
    built_in = CATALOGUE.get(row.strategy)
    kind = built_in.deepspeed_file if built_in is not None else None
    values = deepspeed_config(
        settings,
        stage=zero_stage(row),
        parameter_count=row.settings.parameter_count or 0,
        deepcompile=kind == "deepcompile",
        super_offload=kind == "super_offload",
        swap_folder=settings.nvme_paths[0] if settings.nvme_paths else None,
    )
    for key in _FOR_MEASURING:
        values.pop(key, None)
    values["zero_optimization"].pop("compute_grad_norm", None)  # scripts log the norm
    values["optimizer"] = {"type": "AdamW", "params": adamw_parameters(settings.optimizer)}
    return values


def export(_: Results, row: Row) -> Document:
    return Document(text=json_text(deepspeed_values(row)), notes=notes(row))


def notes(row: Row) -> list[str]:
    """Return what a row of another engine means for DeepSpeed."""
    if tool_of(row.strategy) is Tool.DEEPSPEED:
        return []
    return [
        f"row {row.name} was measured with {row.strategy}; this is DeepSpeed at the same division of state, with the "
        "speed and memory of a deepspeed row"
    ]
