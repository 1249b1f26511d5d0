"""A planned comparison as data: its rows to be, and the options that gave them. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from zerobench import strategies
from zerobench.bench.plan.options import CompareOptions
from zerobench.engine.config import parse as parse_config
from zerobench.results.settings import Changes, Settings, settings_that_change
from zerobench.strategies.catalogue import OURS, Facts

Draft = tuple[str, Settings, dict[str, Any]]
"""A row before it has a name: strategy, settings, and what a zerobench configuration says besides."""


class Configuration(BaseModel):
    """One row to be: a strategy at resolved settings."""

    model_config = ConfigDict(frozen=True)

    name: str
    strategy: str
    stage: int | None
    settings: Settings
    options: dict[str, Any] = {}  # what a zerobench configuration says besides, as from a file
    network_how: Literal["shaped", "paced"] | None = (
        None  # what makes the row's network slower, if anything does
    )
    refused: str | None = None  # why the row is skipped before anything of it starts

    @property
    def facts(self) -> Facts:
        return strategies.facts(self.strategy)

    @property
    def model(self) -> dict[str, Any]:
        return self.settings.model_config_resolved

    @property
    def micro_batch_num(self) -> int:
        """Micro-batches in a step, over all ranks."""
        return math.prod(getattr(self.settings, key) for key in settings_that_change(Changes.MICRO_BATCHES))

    def reference_group(self) -> str:
        """Configurations with the same text train the same global batches to the same parameters."""
        kept = self.settings.model_dump(include=set(settings_that_change(Changes.RESULT)))
        if self.runs_under_autocast:
            kept["autocast"] = True
        return _digest({**kept, "micro_batch_num": self.micro_batch_num})

    @property
    def runs_under_autocast(self) -> bool:
        return self.facts.autocast and self.settings.precision != "fp32"

    def checksum_group(self) -> str | None:
        """Configurations with the same text must end with equal parameters, bit for bit
        (docs/reference/metrics.md, checksum)."""
        if self.strategy not in OURS or self.settings.grad_accum != 1:
            return None
        engine = parse_config({"precision": self.settings.precision, **self._of_the_bits()})
        # By which gradients round.
        loss_scale = engine.loss_scale.model_dump() if engine.scales_loss() else None
        return _digest(
            {
                **self.settings.model_dump(include=set(settings_that_change(Changes.BITS))),
                "reference": self.reference_group(),
                "dtypes": engine.effective_dtypes(),
                "loss_scale": loss_scale,
                "units": engine.units,
                "cast_forward_inputs": engine.cast_forward_inputs,
                "communicator": engine.communicator,  # may add in another order
            }
        )

    def _of_the_bits(self) -> dict[str, Any]:
        """Return the options of the row's file that its bits depend on and that its settings do not include."""
        keys = (
            "precision", "param_dtype", "reduce_dtype", "units", "cast_forward_inputs", "communicator", "loss_scale",
        )  # fmt: skip
        return {key: self.options[key] for key in keys if key in self.options}


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows of a comparison, in the order in which they run, and what to warn of."""

    configurations: list[Configuration]
    options: CompareOptions
    warnings: list[str]
