"""Values of options from their texts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from zerobench.errors import ConfigError
from zerobench.strategies.catalogue import ours_at

T = TypeVar("T")


def split(option: str, text: str, convert: Callable[[str], T]) -> list[T]:
    """A comma list, each value once, in the order given."""
    values: dict[T, None] = {}
    for part in (piece.strip() for piece in text.split(",")):
        try:
            values[convert(part)] = None
        except ConfigError:
            raise
        except (ValueError, KeyError):
            kind = _KINDS[convert]
            raise ConfigError(f"{option} {part!r} is no {kind}: give one or a comma list of them") from None
    return list(values)


def name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def folder(option: str, text: str) -> Path:
    if not text:  # which Path takes for the working folder
        raise ConfigError(f"{option} names nothing: give it a folder")
    return Path(text)


def clip_norm(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def stage_name(text: str) -> str:
    stage = int(text)
    if not 0 <= stage <= 3:
        raise ConfigError(f"--stages {stage} is unknown: ZeRO stages are 0, 1, 2 and 3")
    return ours_at(stage)


def model_options(pairs: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE texts, values in JSON."""
    from zerobench.models.config import NULLABLE_FIELDS

    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--model-option {pair!r} is no FIELD=VALUE, such as num_heads=8")
        field = key.strip().replace("-", "_")
        try:
            options[field] = json.loads(value)
        except json.JSONDecodeError:
            options[field] = value
        if options[field] is None and field not in NULLABLE_FIELDS:
            raise ConfigError(f"--model-option {pair!r} gives no value: leave it out for what the model has")
    return options


def share(text: str) -> float | Literal["auto"]:
    return "auto" if text.lower() == "auto" else float(text)


def on_or_off(text: str) -> bool:
    return {"on": True, "off": False}[text.lower()]


_KINDS: dict[Callable[[str], Any], str] = {
    int: "whole number",
    name: "name",
    clip_norm: "number or none",
    stage_name: "ZeRO stage",
    share: "number or auto",
    on_or_off: "on or off",
}
