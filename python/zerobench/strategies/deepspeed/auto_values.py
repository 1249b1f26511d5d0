"""Files for Hugging Face's Trainer say "auto" where the trainer decides; here the settings do. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def without_auto(
    options: Mapping[str, Any], *, keep: Collection[str] = (), drop: Collection[str] = ()
) -> dict[str, Any]:
    """Keys to keep even so, and keys to drop whatever they say, at any depth."""
    return {
        key: without_auto(value, keep=keep, drop=drop) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if (value != "auto" or key in keep) and key not in drop
    }
