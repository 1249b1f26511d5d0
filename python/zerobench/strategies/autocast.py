"""The reference of rows whose matrix products alone run in low precision: plain PyTorch under autocast, one process."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from zerobench.strategies.base import Dtypes
from zerobench.strategies.shared import autocast, precision_dtype
from zerobench.strategies.single import SingleStrategy


class AutocastStrategy(SingleStrategy):
    """fp32 parameters, gradients and sums; no masters beside them."""

    name = "autocast"

    def _parameter_dtype(self) -> torch.dtype:
        return torch.float32

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.settings)

    def dtypes(self) -> Dtypes:
        compute = str(precision_dtype(self.settings)).removeprefix("torch.")
        return Dtypes(param="float32", compute=compute, reduce="float32", master="float32", state="float32")
