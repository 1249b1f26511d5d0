"""Check a full state before it is loaded."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zerobench.engine.parameters import expect_possible, hyperparameters_of
from zerobench.errors import ConfigError

_MOST_STEPS = 2**63 - 1


class Checked(NamedTuple):
    """A state that the engine can load."""

    tensors: dict[str, dict[str, torch.Tensor]]  # by kind and parameter name
    step: int
    loss_scale: tuple[float, int] | None
    param_groups: list[dict[str, Any]] | None
    held_steps: dict[str, int]  # steps that left a parameter alone, by name, of those with any


def checked_for_loading(
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    step: int,
    loss_scale: Mapping[str, float] | None,
    scales_loss: bool,
    param_groups: Sequence[Mapping[str, Any]] | None,
    groups: Sequence[Mapping[str, Any]],
    buffers: Mapping[str, torch.Tensor] | None,
    unheld: Mapping[str, torch.Tensor],
    may_be_none: bool,
    parameter_steps: Mapping[str, int] | None = None,
) -> Checked:
    """Check and return what ``load_full_state`` was given, for an engine with ``groups`` and parameters ``named`` that
    ``scales_loss`` or not. Raises ConfigError for what cannot be loaded. If tensors ``may_be_none``, those of other
    ranks are not read."""
    states = checked_states(named, tensors, may_be_none=may_be_none)
    if buffers or (buffers is not None and not may_be_none):
        expect_same_tensors("buffers", given=buffers, wanted=unheld, known=unheld)
    step = _checked_step(step)
    return Checked(
        states,
        step,
        _checked_scale(loss_scale, scales_loss=scales_loss),
        _checked_groups(param_groups, groups),
        _checked_parameter_steps(parameter_steps, named, step=step),
    )


def _checked_parameter_steps(given: Any, named: Mapping[str, nn.Parameter], *, step: int) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"parameter_steps to load must be counts by parameter name, not {type(given).__name__}"
        )
    held = {}
    for name, count in given.items():
        if name not in named or not named[name].requires_grad:
            raise ConfigError(f"parameter_steps to load has '{name}', which the model does not train")
        if not isinstance(count, int) or not 0 <= count <= step:
            raise ConfigError(
                f"parameter_steps to load has {count!r} for '{name}', which must be a whole number from 0 to "
                f"{step}, the state's step"
            )
        held[name] = step - count
    return {name: count for name, count in held.items() if count}


def _checked_step(step: Any) -> int:
    try:
        found = operator.index(step)
    except TypeError:
        found = -1
    if not 0 <= found <= _MOST_STEPS:
        raise ConfigError(f"the step to load is {step!r}, which must be a whole number of at least 0")
    return found


def _checked_scale(loss_scale: Any, *, scales_loss: bool) -> tuple[float, int] | None:
    if loss_scale is None:
        return None
    if not scales_loss:
        raise ConfigError("a loss scale was given to load, and only fp16 training scales its loss")
    try:
        scale, good_steps = float(loss_scale["scale"]), operator.index(loss_scale["good_steps"])
    except (TypeError, KeyError, IndexError, ValueError):
        scale, good_steps = math.nan, 0
    if not (0.0 < scale < math.inf and 0 <= good_steps <= _MOST_STEPS):
        raise ConfigError(
            f"the loss scale to load is {loss_scale!r}, which must have a positive 'scale' and a count of "
            "'good_steps', as engine.loss_scale_state() gives them"
        )
    return scale, good_steps


def _checked_groups(given: Any, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Hyperparameters by group, with what schedulers keep there."""
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(group, Mapping) for group in given):
        raise ConfigError(
            "the param groups to load must be a list of dicts, as engine.full_state() gives them"
        )
    if len(given) != len(groups):
        raise ConfigError(
            f"the state to load has {len(given)} param groups and the engine {len(groups)}; give "
            "zerobench.initialize the same model_parameters"
        )
    found = [hyperparameters_of(group) for group in given]
    for index, (mine, theirs) in enumerate(zip(groups, found, strict=True)):
        expect_possible(index, {**mine, **theirs}, cure="put it right in the state to load")
    return found


def checked_states(
    named: Mapping[str, nn.Parameter], given: Mapping[str, Mapping[str, torch.Tensor]], *, may_be_none: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Return what the core is to load, by kind ("parameters", or one of the optimizer's states) and parameter name, in
    fp32 on the host. Frozen parameters have no optimizer state. Raises ConfigError as ``expect_same_tensors`` does, and
    for impossible averages of squares. If no kind has any tensor, that is an error too unless it ``may_be_none``: then
    no value is read."""
    if may_be_none and not any(given.values()):
        return {kind: {} for kind in given}
    named = {name: p for name, p in named.items() if p.is_floating_point()}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for kind, tensors in given.items():
        wanted = named if kind == "parameters" else {n: p for n, p in named.items() if p.requires_grad}
        expect_same_tensors(kind, given=tensors, wanted=wanted, known=named)
        states[kind] = {name: tensors[name].detach().float().cpu().contiguous() for name in wanted}
    for name, average in {} if may_be_none else states["exp_avg_sq"].items():
        if not (average >= 0).all():
            raise ConfigError(
                f"exp_avg_sq of '{name}' to load has a value that is negative or not a number, which an average of "
                "squares cannot have; load the state as it was saved"
            )
    return states


def expect_same_tensors(
    kind: str,
    *,
    given: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    known: Mapping[str, torch.Tensor],
) -> None:
    """Raise ConfigError where ``given`` lacks what is ``wanted``, has what is not ``known``, another shape, or no
    tensors."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"the {kind} to load must be tensors by name, not {type(given).__name__}")
    if missing := sorted(wanted.keys() - given.keys()):
        raise ConfigError(f"the {kind} to load have no '{missing[0]}', which the model has")
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(
            f"the {kind} to load have '{unknown[0]}', which the model lacks; load them into the model that they were "
            "saved from"
        )
    for name, tensor in wanted.items():
        if not isinstance(given[name], torch.Tensor):
            raise ConfigError(
                f"{kind} of '{name}' to load must be a tensor, not {type(given[name]).__name__}"
            )
        if given[name].shape != tensor.shape:
            raise ConfigError(
                f"{kind} of '{name}' to load have shape {tuple(given[name].shape)}, the model's have "
                f"{tuple(tensor.shape)}"
            )
