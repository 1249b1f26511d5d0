"""Results of a strategy's short deterministic run, and those of the reference that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerobench.bench.rank.reads import WorstRead

Tensors = Mapping[str, torch.Tensor]
"""fp32, by the parameter's name."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Results of a strategy's short deterministic run."""

    loss: float  # this rank's mean, step 1
    norm: float | None  # global, before clipping, step 1
    gradients: Tensors  # full, averaged, unclipped, step 1
    parameters: Tensors  # full, after VERIFY_STEPS
    moments: Tensors  # full exp_avg, after VERIFY_STEPS
    moment_samples: Sequence[Tensors]  # of each step
    # The following of a held-out batch after VERIFY_STEPS; None where a peer cannot evaluate or be watched.
    evaluation: float | None = None
    read: WorstRead | None = None
    loss_dtype: str | None = None


class Reference(NamedTuple):
    """Tensors of the reference, as Evidence has them."""

    gradients: Tensors
    updates: Tensors  # parameters after VERIFY_STEPS less the first ones
    parameters: Tensors
    moments: Tensors
