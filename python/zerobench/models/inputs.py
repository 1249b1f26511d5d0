"""Convert inputs and keep statistics for forwards in low precision, for any model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_LOW = (torch.bfloat16, torch.float16)


def follow_precision(model: nn.Module) -> None:
    """Round float32 inputs of forward, such as pixels, to the dtype that parameters have by then, and the running
    statistics of batch norms to that of their weights. torch refuses products and norms of mixed dtypes."""
    model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            module.register_forward_pre_hook(_cast_statistics)


def _cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    if dtype not in _LOW:
        return args, kwargs

    def cast(value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(dtype) if is_wide else value

    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def _cast_statistics(module: nn.Module, args: tuple[Any, ...]) -> None:
    weight = module.weight
    for name in ("running_mean", "running_var"):
        found = getattr(module, name)
        if isinstance(weight, torch.Tensor) and found is not None and found.dtype != weight.dtype:
            setattr(module, name, found.to(weight.dtype))
