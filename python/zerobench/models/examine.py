"""Build a model in a fresh process and report its facts. This process imports no torch and runs no user code."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

from zerobench.errors import ConfigError
from zerobench.models.config import ModelConfig
from zerobench.models.measured import MeasuredConfig
from zerobench.models.parse import from_dict


def examine(config: ModelConfig, *, seq_length: int, checkpointing: bool = False) -> ModelConfig:
    """Return ``config`` with what its model tells: parameters, vocabulary, longest sequence, attention. A model whose
    sizes are known already is returned as it is.

    A fresh process builds the model and, where it is small enough, trains on one micro-batch. Raises ConfigError for a
    model that cannot be built or compared."""
    if not isinstance(config, MeasuredConfig):
        return config
    request = {"config": config.model_dump(), "seq_length": seq_length, "checkpointing": checkpointing}
    return from_dict(json.loads(_answer(json.dumps(request))))


@cache
def _answer(request: str) -> str:
    """Return the examined configuration as JSON."""
    message = json.dumps({**json.loads(request), "path": sys.path})
    name = json.loads(request)["config"]["name"]
    run = subprocess.run(
        [sys.executable, "-m", "zerobench.models.trial"], input=message, capture_output=True, text=True
    )
    answer: dict[str, Any] = {}
    if run.returncode == 0:
        answer = json.loads(run.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"])
    if "config" not in answer:
        last = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "it said nothing")
        raise ConfigError(
            f"model {name!r}: the process that built it ended with code {run.returncode} ({last.strip()}): build it "
            "once by itself to see why"
        )
    return json.dumps(answer["config"])
