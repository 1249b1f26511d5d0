"""Nested configurations, one over the other. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` set at any depth: known keys keep their place, new ones follow."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = merge(inner, value)
        merged[key] = value
    return merged
