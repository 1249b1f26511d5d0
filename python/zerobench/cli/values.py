"""Values of options from their texts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from zerobench.errors import ConfigError


def model_options(pairs: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE texts, values in JSON."""
    from zerobench.models.config import NULLABLE_FIELDS

    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--model-option {pair!r} is not FIELD=VALUE, such as num_heads=8")
        field = key.strip().replace("-", "_")
        try:
            options[field] = json.loads(value)
        except json.JSONDecodeError:
            options[field] = value
        if options[field] is None and field not in NULLABLE_FIELDS:
            raise ConfigError(f"--model-option {pair!r} has no value: remove it to keep the model's own")
    return options
