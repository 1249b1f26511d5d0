"""What a model must be for an engine to train it, asked before anything of it is changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zerobench.errors import ConfigError
from zerobench.hooks import ModuleHooks, UnitHooks


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
    _expect_no_engine(model)
    _expect_unspread(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"'{name}' has no shape before the model's first forward, as in torch.nn.LazyLinear; run one forward "
                "before zerobench.initialize"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise ConfigError(f"buffer '{name}' is sparse; make it dense")


def _expect_unspread(model: nn.Module) -> None:
    """What spreads training itself would average gradients twice, or hold a part of each parameter."""
    for module in model.modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ConfigError(
                f"a {type(module).__name__} spreads training itself, beside the engine; give zerobench.initialize the "
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


def _expect_no_engine(model: nn.Module) -> None:
    """Of the model or of a part of it."""
    for module in model.modules():
        hooked = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        if any(isinstance(owner, (ModuleHooks, UnitHooks)) for owner in hooked):
            raise ConfigError(
                f"an engine trains this {type(module).__name__} already; call that engine's close() first"
            )
