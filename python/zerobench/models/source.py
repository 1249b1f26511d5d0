"""A model with batches and a loss of its own, which a user's function can return instead of a module.

Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerobench.data import BatchRequest


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model to compare, with its batches and its loss. ``--model package.module:function`` takes a function without
    arguments that returns one."""

    model: Callable[[], nn.Module]
    """Makes the module, in float32. torch, numpy and ``random`` are seeded by --seed before every call, so all ranks
    begin with the same values."""
    batch: Callable[[BatchRequest], Mapping[str, torch.Tensor]] | None = None
    """Makes a micro-batch on the CPU, the same one for the same request. None: ``input_ids`` and ``labels``, both the
    tokens of --data."""
    loss: Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    """Returns the mean loss of a batch from ``model`` and ``batch``. None: the module is called with the batch's
    tensors as keyword arguments and returns the loss, or an output with ``.loss`` or ``["loss"]``."""
    vocab_size: int = 256
    """Tokens of --data are below it. Text has 256."""
    max_seq_length: int | None = None
    """Longest sequence that the model takes. None: any."""
