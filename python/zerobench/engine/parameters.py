"""Parameters of a model as the core is given them, and the values of those that have none yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zerobench.engine.units import UnitModules
from zerobench.errors import ConfigError

if TYPE_CHECKING:
    from zerobench._core import ParameterArgument

_HELD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Materialise = Callable[..., Any]
"""``materialise(model, names, device=...)`` gives parameters on the meta device memory and values."""


def param_groups(
    model: nn.Module, model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Torch-style param groups of what is to be trained: by default every parameter of the model in one group.

    Parameters that need no gradient are left out: a frozen model has groups without parameters. Raises ConfigError for
    what is no parameter of the model, for complex ones that need a gradient, and for a model without parameters.
    """
    every = list(model.parameters())
    given = every if model_parameters is None else _listed(model_parameters)
    if not given and (not every or any(parameter.requires_grad for parameter in every)):
        raise ConfigError("the model has no parameters to train")
    are_groups = bool(given) and isinstance(given[0], dict)
    if any(isinstance(each, dict) != are_groups for each in given):
        raise ConfigError(
            "model_parameters mixes param groups (dicts) with parameters; put the parameters into a group of their "
            "own, {'params': [...]}"
        )
    groups = given if are_groups else [{"params": given}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ConfigError(
                f"parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')}, which cannot be trained; hold "
                "it as floating-point parts (torch.view_as_real) or call requires_grad_(False)"
            )
    known = {id(parameter) for parameter in every}
    cleaned = []
    for index, group in enumerate(groups):
        if "params" not in group:
            raise ConfigError(f"param group {index} has no 'params'")
        parameters = _listed(group["params"])
        for parameter in parameters:
            if not isinstance(parameter, torch.Tensor):
                raise _no_parameters(parameter)
            if id(parameter) not in known:
                raise ConfigError(
                    f"param group {index} has a parameter of shape {tuple(parameter.shape)} that the model does not "
                    "have"
                )
        cleaned.append({**group, "params": [p for p in parameters if p.requires_grad]})
    return cleaned


def hyperparameters_of(group: dict[str, Any]) -> dict[str, Any]:
    """All of a param group but its parameters; what is a tensor or numpy's, as Python's number."""
    return {
        key: value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def expect_possible(index: int, group: Mapping[str, Any], *, cure: str) -> dict[str, float]:
    """The group's numbers, before the core is asked for anything, so that gathered gradients wait for what is put
    right. Raises ConfigError for what no update can have."""
    betas = group["betas"]
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"param group {index} has betas {betas!r}, which must be two numbers; {cure}")
    given = {"lr": group["lr"], "beta1": betas[0], "beta2": betas[1]}
    given |= {key: group[key] for key in ("eps", "weight_decay")}
    found = {}
    for key, value in given.items():
        limit = 1.0 if key in ("beta1", "beta2") else math.inf
        try:
            found[key] = float(value)
        except (TypeError, ValueError, RuntimeError):  # the last: of a tensor with several elements
            raise ConfigError(
                f"param group {index} has {key} {value!r}, which must be a number; {cure}"
            ) from None
        if not 0.0 <= found[key] < limit:
            raise ConfigError(
                f"param group {index} has {key} {found[key]}, which must be at least 0 and "
                f"{'below 1' if limit == 1.0 else 'finite'}; {cure}"
            )
    return found


def core_arguments(
    *, units: UnitModules, groups: list[dict[str, Any]], dtypes: dict[str, str]
) -> list[ParameterArgument]:
    """The core's ParameterArgument of every floating-point parameter, in the model's order.

    ``dtypes`` by role: param, reduce, accumulate. Raises ConfigError for a parameter that needs a gradient and is in no
    group, and for one that no engine can hold.
    """
    from zerobench import _core

    unit_of = units.unit_of_parameters()
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    arguments = []
    for name, parameter in _floating(units.modules[0]):
        trainable = parameter.requires_grad and id(parameter) in group_of
        if parameter.requires_grad and not trainable:
            raise ConfigError(
                f"parameter '{name}' needs a gradient but is in no param group; add it to model_parameters or call "
                "requires_grad_(False)"
            )
        if parameter.dtype not in _HELD_DTYPES:
            raise ConfigError(
                f"parameter '{name}' is {str(parameter.dtype).removeprefix('torch.')}, and engines hold float32, "
                "bfloat16 and float16, frozen parameters too; convert it first (model.float()) or make it a buffer"
            )
        arguments.append(
            _core.ParameterArgument(
                name,
                # The core must not hold what materialise is to swap for another tensor.
                torch.empty_like(parameter) if parameter.is_meta else parameter,
                param_dtype=dtypes["param"],
                reduce_dtype=dtypes["reduce"],
                accumulate_dtype=dtypes["accumulate"],
                trainable=trainable,
                param_group=group_of.get(id(parameter), 0),
                unit=unit_of[name],
            )
        )
    return arguments


def materialise_unit(
    unit: int, *, materialise: Materialise, units: UnitModules, device: str
) -> dict[int, torch.Tensor]:
    """Give the unit's parameters on the meta device values; the new tensors by index into ``core_arguments``. Raises
    ConfigError where ``materialise`` gave none, or such as do not fit."""
    model = units.modules[0]
    unit_of = units.unit_of_parameters()
    wanted = {
        name: (index, p.shape, p.dtype)  # not the parameter, which may be swapped for the one that is made
        for index, (name, p) in enumerate(_floating(model))
        if p.is_meta and unit_of[name] == unit
    }
    if not wanted:
        return {}
    materialise(model, list(wanted), device=device)
    made = dict(model.named_parameters())
    for name, (_, shape, dtype) in wanted.items():
        given = made.get(name)
        if given is None or given.is_meta or not given.is_floating_point() or given.shape != shape:
            found = (
                "none"
                if given is None
                else f"one of shape {tuple(given.shape)}, {given.dtype} on {given.device}"
            )
            raise ConfigError(
                f"materialise must give values to '{name}', of shape {tuple(shape)} and {dtype}, and "
                f"left {found}; make it keep each parameter's name and shape, with values on {device}"
            )
    return {index: made[name] for name, (index, _, _) in wanted.items()}


def _floating(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Quantised and integer parameters stay where they are."""
    return [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        raise _no_parameters(parameters)
    return list(parameters)


def _no_parameters(given: object) -> ConfigError:
    return ConfigError(
        f"model_parameters must hold parameters or dicts with 'params', not {type(given).__name__}; pass "
        "model.parameters()"
    )
