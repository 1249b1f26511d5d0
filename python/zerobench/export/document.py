"""Text of an exported file, with notes about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Document:
    """The text of a configuration or of a launch line, with notes for whoever uses it."""

    text: str
    notes: list[str] = field(default_factory=list)


def json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


def yaml_text(values: Mapping[str, Any], indent: str = "") -> str:
    """Return nested mappings of scalars as YAML."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {yaml_scalar(value)}\n")
    return "".join(lines)


def yaml_scalar(value: Any) -> str:
    """Return a scalar as YAML 1.1 reads it: as JSON, but 1e-08 would be a text there and 1.0e-08 is a number."""
    text = json.dumps(value)
    return (
        text.replace("e", ".0e", 1) if isinstance(value, float) and "e" in text and "." not in text else text
    )
