"""Checks that an engine can train a model, made before anything of the model is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from zerobench.engine.hooks import ModuleHooks, UnitHooks
from zerobench.errors import ConfigError

_held: Any = WeakIdKeyDictionary()  # parameters that engines hold


def hold(parameters: Iterable[nn.Parameter]) -> None:
    """No other engine may have them until they are released: each would move them into memory of its own."""
    _held.update(dict.fromkeys(parameters))


def release(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        _held.pop(parameter, None)


def expect_trainable(model: object, materialise: object) -> None:
    """Raise ConfigError where the model is none, is not ready, or is trained by another engine."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ConfigError(f"model must be a torch.nn.Module, not {what}; make the model first")
    if materialise is not None and not callable(materialise):
        raise ConfigError(
            f"materialise must be a function, not {type(materialise).__name__}; pass "
            "zerobench.models.materialise.materialise, or one of your own"
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "zerobench.initialize was called in torch.inference_mode(), where nothing made can be trained; call it "
            "outside"
        )
    _expect_no_engine(model)
    _expect_unspread(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"module '{name or type(module).__name__}' is scripted, and such modules take no hooks, by which an "
                "engine knows what is used; give zerobench.initialize the module as it was, or torch.compile it"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"'{name}' has no shape before the model's first forward, as in torch.nn.LazyLinear; run one forward "
                "before zerobench.initialize"
            )
        is_held = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        if tensor.is_inference() and (is_held or tensor.requires_grad):
            raise ConfigError(
                f"parameter '{name}' was made in torch.inference_mode(), whose tensors an engine can neither train nor "
                "move; build the model outside of it, for a frozen model in torch.no_grad()"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise ConfigError(f"buffer '{name}' is sparse; make it dense")
    _expect_memory_of_their_own(model)


def _expect_unspread(model: nn.Module) -> None:
    """Raise ConfigError for a model that distributes training itself: gradients would be averaged twice, or only a part
    of each parameter held."""
    for module in model.modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ConfigError(
                f"a {type(module).__name__} distributes training itself; give zerobench.initialize the "
                "model that it wraps (its .module)"
            )
    for name, parameter in model.named_parameters():
        if (
            parameter.is_floating_point()
            and not is_lazy(parameter)
            and type(parameter.data) is not torch.Tensor
        ):
            raise ConfigError(
                f"parameter '{name}' is a {type(parameter.data).__name__}, which an engine cannot shard; give "
                "zerobench.initialize the model as it is before fully_shard, tensor parallelism or quantisation"
            )


def _expect_memory_of_their_own(model: nn.Module) -> None:
    """Each parameter moves into memory of its own, where what overlapped a trained one would follow it no more."""
    spans = [
        _Span(tensor.data_ptr(), _end(tensor), name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if type(tensor.data) is torch.Tensor and tensor.layout == torch.strided
        if tensor.numel() and not tensor.is_meta
    ]
    spans.sort(key=lambda span: (str(span.tensor.device), span.begin))
    before: list[_Span] = []  # those that reach further than the next one's begin
    for span in spans:
        before = [
            each for each in before if each.end > span.begin and each.tensor.device == span.tensor.device
        ]
        for each in before:
            if (each.tensor.requires_grad or span.tensor.requires_grad) and _overlap(each, span):
                raise ConfigError(
                    f"'{each.name}' and '{span.name}' are two tensors in the same memory (by an assignment to .data, "
                    "say), which training would move apart; tie parameters by assigning the nn.Parameter itself, or "
                    "give each its own (.clone())"
                )
        before.append(span)


class _Span(NamedTuple):
    """Addresses between which a tensor's values lie."""

    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def _end(tensor: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _overlap(first: _Span, second: _Span) -> bool:
    """Return whether spans that overlap share a value: columns of a matrix lie between each other and do not."""
    if first.begin == second.begin or first.tensor.dtype != second.tensor.dtype:
        return True
    size = first.tensor.element_size()
    places = torch.arange((max(first.end, second.end) - first.begin) // size)
    own = [
        places.as_strided(
            each.tensor.shape, each.tensor.stride(), (each.begin - first.begin) // size
        ).flatten()
        for each in (first, second)
    ]
    return bool(torch.isin(*own).any())


def _expect_no_engine(model: nn.Module) -> None:
    """Raise ConfigError if an engine trains the model or a part of it already."""
    for module in model.modules():
        hooked = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        if any(isinstance(owner, (ModuleHooks, UnitHooks)) for owner in hooked):
            raise ConfigError(
                f"an engine trains this {type(module).__name__} already; call that engine's close() first"
            )
    for name, parameter in model.named_parameters():
        if parameter in _held:
            raise ConfigError(
                f"an engine holds parameter '{name}' already, of this model or of one that shares it; call that "
                "engine's close() first, or train both with one engine, as parts of one module"
            )
