"""A user's own module, behind a forward that returns its loss."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from zerobench.errors import ConfigError
from zerobench.host import imports
from zerobench.models.inputs import follow_precision
from zerobench.models.place_config import PlaceConfig
from zerobench.models.source import ModelSource

_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
Loss = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


class Output(NamedTuple):
    """A named tuple: wrappers (DDP, FSDP2) look for the tensors of an output in tuples."""

    loss: torch.Tensor


class OwnModel(nn.Module):
    """Calls a module's own loss, so that every strategy can read ``.loss`` from what forward returns."""

    def __init__(self, model: nn.Module, loss: Loss | None, *, name: str) -> None:
        super().__init__()
        self.model = model
        self._loss = loss or loss_of_output
        self._name = name
        for method in _CHECKPOINTING:
            if hasattr(model, method):
                setattr(self, method, getattr(model, method))

    def forward(self, **batch: torch.Tensor) -> Output:
        loss = self._loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"model {self._name!r} returned a loss of {found}: return the batch's mean loss, a tensor without "
                "dimensions"
            )
        return Output(loss)


def loss_of_output(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that the module's own forward computes from the batch."""
    output: Any = model(**batch)
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(
            f"{type(model).__name__} returned a {type(output).__name__} without a loss: return the loss or an output "
            "with .loss, or give a ModelSource with a loss"
        )
    return loss


def load_source(place: str, seed: int) -> ModelSource:
    """Return what the function at ``place`` returns, a module as a ModelSource that makes it."""
    function = imports.load(place, what=f"model {place!r}")
    module_name, _, name = place.partition(":")
    if not callable(function):
        found = "has no" if function is None else f"has a {type(function).__name__} and no"
        raise ConfigError(f"model {place!r}: {module_name} {found} function named {name!r}")
    made = _called(place, function, seed)
    if isinstance(made, nn.Module):
        return ModelSource(model=lambda: made, vocab_size=_vocab_size(made))
    if not isinstance(made, ModelSource):
        raise ConfigError(
            f"model {place!r}: {name} returned a {type(made).__name__}: return a torch.nn.Module or a "
            "zerobench.models.ModelSource"
        )
    return made


def place_model(config: PlaceConfig, seed: int) -> OwnModel:
    """Return the model with the values that ``seed`` gives it."""
    source = load_source(config.place, seed)
    model = _called(config.place, source.model, seed)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {config.place!r}: its ModelSource.model returned a {type(model).__name__}: return a torch.nn.Module"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"model {config.place!r}: parameter {name!r} is {parameter.dtype}: make the model in float32, which "
                "--precision then rounds"
            )
    set_dropout(model, config.dropout)
    own = OwnModel(model, source.loss, name=config.place)
    follow_precision(own)
    return own


def set_dropout(model: nn.Module, dropout: float) -> None:
    """Set the dropout of every layer of torch that has one."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = dropout
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = dropout


def _called(place: str, function: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model {place!r}: its function failed: {imports.told(error)}: fix that") from error


def _vocab_size(module: nn.Module) -> int:
    found = getattr(getattr(module, "config", None), "vocab_size", None)
    return found if isinstance(found, int) and found > 0 else 256
