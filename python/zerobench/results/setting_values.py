"""Values of settings from the texts of the command line, and back. Imports neither torch nor the core."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from zerobench.errors import ConfigError
from zerobench.strategies.catalogue import ours_at

T = TypeVar("T")


def name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def clip_norm(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def stage_name(text: str) -> str:
    stage = int(text)
    if not 0 <= stage <= 3:
        raise ConfigError(f"--stages {stage} is unknown: ZeRO stages are 0, 1, 2 and 3")
    return ours_at(stage)


def share(text: str) -> float | Literal["auto"]:
    return "auto" if text.lower() == "auto" else float(text)


def run_num(text: str) -> int | Literal["auto"]:
    if text.lower() == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--repeats {text} is not valid: use a whole number above zero, or auto")
    return int(text)


def precision(text: str) -> float:
    """Return a share from a percentage such as "1%", or from a number."""
    return percentage("--ratio-precision", text, example="a share of a ratio, such as 1% or 0.01")


def percentage(option: str, text: str, *, example: str) -> float:
    """Return a share between 0 and 1 from a percentage or a number. Raise ConfigError that names ``option``."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise ConfigError(f"{option} {text} is not valid: use {example}")
    return found


def on_or_off(text: str) -> bool:
    return {"on": True, "off": False}[text.lower()]


KINDS: dict[Callable[[str], Any], str] = {
    int: "whole number",
    name: "name",
    clip_norm: "number or none",
    stage_name: "ZeRO stage",
    share: "number or auto",
    on_or_off: "on or off",
}
"""Words for a value that one of these makes, for errors."""


def split(option: str, text: str, convert: Callable[[str], T]) -> list[T]:
    """Return the values of a comma-separated list, each once, in the order given. Raises ConfigError, which names
    ``option``."""
    values: dict[T, None] = {}
    for part in (piece.strip() for piece in text.split(",")):
        try:
            values[convert(part)] = None
        except ConfigError:
            raise
        except (ValueError, KeyError):
            kind = KINDS[convert]
            raise ConfigError(
                f"{option} {part!r} is not a {kind}: give one or a comma-separated list of them"
            ) from None
    return list(values)


def comma_list(values: Sequence[str]) -> str:
    """Return the values of an option that takes several as one comma-separated list; spaces separate as commas do."""
    return re.sub(r"\s*,\s*|\s+", ",", " ".join(values).strip())


def typed(value: Any) -> str:
    """Return the shortest text that gives the value back on the command line."""
    if value is None or isinstance(value, bool):
        return {True: "on", False: "off", None: "none"}[value]
    return value if isinstance(value, str) else repr(value).removesuffix(".0")


def shown(value: float | str) -> str:
    """Return the text of a value in a row's name."""
    return value.replace(":", "-") if isinstance(value, str) else f"{value:g}"
