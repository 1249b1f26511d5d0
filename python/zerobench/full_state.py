"""The full state of an engine: what of it the core does not hold, and what one to load must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zerobench.errors import ConfigError


def checked_states(
    model: nn.Module, given: Mapping[str, Mapping[str, torch.Tensor]], *, may_be_none: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """What the core is to load, by kind ("parameters", or one of the optimizer's states) and parameter name, in fp32 on
    the host. Raises ConfigError as ``expect_same_tensors`` does; frozen parameters have no optimizer state. Where no
    kind has any, that is an error too unless it ``may_be_none``."""
    if may_be_none and not any(given.values()):
        return {kind: {} for kind in given}
    named = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for kind, tensors in given.items():
        wanted = named if kind == "parameters" else {n: p for n, p in named.items() if p.requires_grad}
        expect_same_tensors(kind, given=tensors, wanted=wanted, known=named)
        states[kind] = {name: tensors[name].detach().float().cpu().contiguous() for name in wanted}
    return states


def expect_same_tensors(
    kind: str,
    *,
    given: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    known: Mapping[str, torch.Tensor],
) -> None:
    """Raise ConfigError where ``given`` lacks what is ``wanted``, has what is not ``known``, or another shape."""
    if missing := sorted(wanted.keys() - given.keys()):
        raise ConfigError(f"the {kind} to load have no '{missing[0]}', which the model has")
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(
            f"the {kind} to load have '{unknown[0]}', which the model lacks; load them into the model that they were "
            "saved from"
        )
    for name, tensor in wanted.items():
        if given[name].shape != tensor.shape:
            raise ConfigError(
                f"{kind} of '{name}' to load have shape {tuple(given[name].shape)}, the model's have "
                f"{tuple(tensor.shape)}"
            )


def unheld_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What belongs to a state beside the engine's parameters: persistent buffers, integer and complex parameters."""
    tensors: dict[str, torch.Tensor] = {
        n: p for n, p in model.named_parameters() if not p.is_floating_point()
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def share_unheld(core: Any, model: nn.Module, *, device: str, dtype: torch.dtype) -> None:
    """Give every rank what rank 0 has and the core does not hold: buffers, put on the device, and integer and complex
    parameters. Statistics of normalisation layers become ``dtype``, the parameters'. Collective. Raises ConfigError for
    a buffer without values."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer '{name}' is on the meta device and has no values; have the function given as materialise= put "
                "buffers onto the device, too, or build the model with them there"
            )
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffer = buffer.to(device)
            if any(
                size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                buffer = buffer.contiguous()  # one that was expanded cannot be written
            module._buffers[name] = buffer
            if isinstance(module, _NormBase) and buffer.is_floating_point():
                module._buffers[name] = buffer = buffer.to(dtype)
            buffer.copy_(of_rank_0(core, buffer))
    for parameter in model.parameters():
        if not parameter.is_floating_point() and not parameter.is_meta:
            parameter.data.copy_(of_rank_0(core, parameter))


def of_rank_0(core: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host of the values that rank 0 has. Collective."""
    values = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    core.broadcast(values)
    return values
