"""Gradient checkpointing of every block, whatever the model calls it. Importing this imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from zerobench.errors import ConfigError
from zerobench.models.hf_config import ARCHITECTURES

if TYPE_CHECKING:
    from torch import nn


def enable_checkpointing(model: nn.Module) -> None:
    """Keep each block's input only, and compute the block again in backward. Raises ConfigError for a model without
    transformers' ``gradient_checkpointing_enable``, which ours have too."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # transformers from 5.2x on
    if enable is None:
        enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            f"{type(model).__name__} has no gradient_checkpointing_enable: remove --checkpointing"
        )
    try:
        _enable(enable, model)
    except ValueError as error:  # transformers', of a model without
        raise ConfigError(f"{' '.join(str(error).split())}: remove --checkpointing") from error


def _enable(enable: Callable[..., object], model: nn.Module) -> None:
    if "activation_checkpointing_kwargs" in inspect.signature(enable).parameters:
        enable(activation_checkpointing_kwargs=_arguments(model))
    elif "gradient_checkpointing_kwargs" in inspect.signature(enable).parameters:
        enable(gradient_checkpointing_kwargs=_arguments(model))
    else:
        enable(use_reentrant=False)


def _arguments(model: nn.Module) -> dict[str, bool]:
    """Return the arguments of torch's checkpoint. A model that draws no random numbers does not save the random state
    of every block."""
    config = getattr(model, "config", None)
    kind = ARCHITECTURES.get(getattr(config, "model_type", ""))
    draws = kind is None or any(getattr(config, key, 0.0) for key in kind.dropouts)
    return {"use_reentrant": False, "preserve_rng_state": draws}
