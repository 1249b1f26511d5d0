"""Tensors of a model that the core does not hold: buffers, integer and complex parameters. Each rank has its own until
they are shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zerobench.errors import ConfigError

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine


def unheld_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a state that are not the engine's parameters: persistent buffers, integer and complex
    parameters."""
    tensors: dict[str, torch.Tensor] = {
        n: p for n, p in model.named_parameters() if not p.is_floating_point()
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a state."""
    return {
        name: tensor for name, tensor in unheld_tensors(model).items() if not isinstance(tensor, nn.Parameter)
    }


def settle_buffers(model: nn.Module, *, device: str, dtype: torch.dtype) -> None:
    """Put buffers onto the device, where each can be written; statistics of normalisation layers become ``dtype``, the
    parameters'. Raises ConfigError for a buffer without values."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer '{name}' is on the meta device and has no values; make the function given as materialise= put "
                "buffers onto the device, too, or build the model with them there"
            )
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffer = buffer.to(device)
            if any(
                size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                buffer = buffer.contiguous()  # one that was expanded cannot be written
            if buffer.is_inference():
                buffer = buffer.clone()
            if isinstance(module, _NormBase) and buffer.is_floating_point():
                buffer = buffer.to(dtype)
            module._buffers[name] = buffer


def tensors_to_share(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what every rank gets from rank 0 when an engine is made, in addition to the engine's parameters: every
    buffer, integer and complex parameters."""
    parameters = {n: p for n, p in unheld_tensors(model).items() if not p.is_meta}
    return parameters | dict(model.named_buffers())


def share_tensors(core: CoreEngine, tensors: Mapping[str, torch.Tensor], *, rank: int = 0) -> None:
    """Give every rank the values that ``rank`` has; all have the same names and shapes. Collective."""
    for _, tensor in sorted(tensors.items()):
        tensor.data.copy_(of_rank_0(core, tensor) if rank == 0 else _of_rank(core, tensor, rank))


def of_rank_0(core: CoreEngine, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host of the values that rank 0 has. Collective."""
    values = _on_host(tensor)
    core.broadcast(values)
    return values


def _of_rank(core: CoreEngine, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    values = _on_host(tensor)
    if not values.numel():
        return values
    together = core.exchange(values.view(-1).view(torch.uint8).numpy().tobytes())
    begin = rank * values.nbytes
    return torch.frombuffer(bytearray(together[begin : begin + values.nbytes]), dtype=values.dtype).view_as(
        values
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
