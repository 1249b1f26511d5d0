"""Tensors in what modules are given and return: containers, dataclasses, what torch's pytree knows, objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zerobench.errors import StateError

_PLAIN = (bool, int, float, str, type, nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested containers and dataclasses, and those that objects of other classes hold themselves. Each
    container is looked into once, so that one may hold itself."""
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(value):  # torch.vmap's, which have no node
                value = torch._C._functorch.get_unwrapped(value)
            yield value
        elif value is not None and not isinstance(value, _PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            waiting.extend(_held(value))


def _held(value: Any) -> Iterable[Any]:
    if dataclasses.is_dataclass(value):  # transformers' outputs are dicts, too
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, dict):  # pytree looks into no subclass, and no set
        return value.values()
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    leaves = pytree.tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves
    # No container that pytree knows.
    return [leaf for leaf in pytree.tree_leaves(_attributes(value)) if isinstance(leaf, torch.Tensor)]


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            found.setdefault(name, getattr(value, name, None))
    return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``. What holds none that changes is left as it is, so that a
    forward fills the caller's own list; what holds one is copied, without what it holds itself. Raises StateError for
    what holds itself."""
    try:
        return _cast(value, dtype)
    except RecursionError:
        raise StateError(
            "the model's inputs hold themselves, or are nested too deeply, so they cannot be cast to the parameters' "
            'dtype; set "cast_forward_inputs": false and give them in that dtype'
        ) from None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        changed = _changed(value.items(), dtype)
        if not changed or not isinstance(value, MutableMapping):
            return value
        mapping = _copied(value)
        for key, held in changed.items():  # transformers' outputs have no update()
            mapping[key] = held
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        changed = _changed([(name, getattr(value, name)) for name in names], dtype)
        if not changed:
            return value
        copied = copy.copy(value)
        for name, held in changed.items():
            object.__setattr__(copied, name, held)  # frozen ones, too
        return copied
    leaves, structure = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if len(leaves) == 1 and leaves[0] is value:
        return value
    cast_leaves = [_cast(leaf, dtype) for leaf in leaves]
    if all(new is old for new, old in zip(cast_leaves, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(cast_leaves, structure)


def _changed(items: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    pairs = [(key, old, _cast(old, dtype)) for key, old in items]
    return {key: new for key, old, new in pairs if new is not old}


def _copied(mapping: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """A copy whose items are its own: a class may keep them in a dict, which copy.copy would share."""
    copied = copy.copy(mapping)
    if not isinstance(copied, dict):
        for name, held in vars(copied).items() if hasattr(copied, "__dict__") else ():
            if type(held) is dict:
                copied.__dict__[name] = held.copy()
    return copied
