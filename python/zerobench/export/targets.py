"""The tools that a row can be exported to. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from zerobench.errors import ConfigError, did_you_mean
from zerobench.export.document import Document
from zerobench.results.schema import Results, Row
from zerobench.strategies.catalogue import Tool

TARGETS = {
    "deepspeed": "deepspeed:export",
    "accelerate": "hugging_face:accelerate",
    Tool.FSDP2.value: "scripts:fsdp2",
    "zerobench": "scripts:zerobench",
    "torchrun": "scripts:torchrun",
    "trl": "hugging_face:trl",
}
"""Module and function of this package, imported when used, since most import torch."""


def exported(results: Results, row: Row, target: str) -> Document:
    """Return the row for a tool. Raises ConfigError for an unknown tool, DataError for a row that it cannot run."""
    if target not in TARGETS:
        hint = did_you_mean(target, TARGETS)
        raise ConfigError(f"--to {target} is unknown: {hint}known: {', '.join(TARGETS)}")
    module, _, name = TARGETS[target].partition(":")
    make: Callable[[Results, Row], Document] = getattr(
        importlib.import_module(f"zerobench.export.{module}"), name
    )
    return make(results, row)
