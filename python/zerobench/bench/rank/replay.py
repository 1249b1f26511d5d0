"""AdamW replayed from a strategy's own first moments: whether its updates are those of the hyperparameters asked for.

Against another strategy's updates a learning rate 5 % off is lost in what low precision does to gradients. From its own
moments the gradients that a strategy used are known, and with them what AdamW makes of them, in any precision."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zerobench.strategies.base import OptimizerSettings

_SAMPLE_NUMEL = 1 << 14
"""Of a parameter, evenly spaced, so that every rank's part is among them, be it of rows or of columns."""
_ROUNDING = 16 * 2.0**-24
"""Of a parameter: what its own rounding in a few steps may come to, which a small learning rate is not far above."""
_TINY = 1e-30


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements, copied to the host, in one dimension."""
    flat = tensor.detach().reshape(-1)
    every = math.ceil(flat.numel() / _SAMPLE_NUMEL) | 1  # odd: columns come in powers of two
    return flat[::every].to("cpu", copy=True)


def replayed(
    initial: torch.Tensor, moments: Sequence[torch.Tensor], settings: OptimizerSettings
) -> torch.Tensor:
    """Parameters after as many steps as there are first ``moments`` (exp_avg after each step), in fp64: Adam of Kingma
    and Ba (arXiv:1412.6980) with the decay of Loshchilov and Hutter (arXiv:1711.05101)."""
    beta1, beta2 = settings.beta1, settings.beta2
    parameter = initial.double()
    before, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, now in enumerate((moment.double() for moment in moments), start=1):
        gradient = (now - beta1 * before) / (1 - beta1)
        square = beta2 * square + (1 - beta2) * gradient.square()
        size = (square / (1 - beta2**step)).sqrt() + settings.eps
        parameter = parameter * (1 - settings.lr * settings.weight_decay)
        parameter = parameter - settings.lr / (1 - beta1**step) * now / size
        before = now
    return parameter


def optimizer_deviation(
    found: torch.Tensor, initial: torch.Tensor, moments: Sequence[torch.Tensor], settings: OptimizerSettings
) -> float:
    """||p - replayed p|| / ||update|| of one parameter's sampled elements, less their own rounding."""
    expected, begin = replayed(initial, moments, settings), initial.double()
    error = ((found.double() - expected).abs() - _ROUNDING * begin.abs()).clamp(min=0)
    return float(error.norm() / (expected - begin).norm().clamp(min=_TINY))
