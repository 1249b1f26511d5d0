"""A finding, and the facts that it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Facts = Mapping[str, Any]
"""As host/inventory.py collects them. One that could not be had is None or missing, and never a finding."""

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A state of the machine that stops training (error), makes it slower or smaller (warning), or is worth knowing
    (note)."""

    level: Level
    subject: str
    what: str
    cost: str
    cure: str
