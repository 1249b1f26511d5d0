"""Finds embeddings and heads whose parameters a forward uses without calling them, and gathers them with the root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from zerobench.engine.units import UnitModules

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine


class UncalledWatch:
    """Watches the first training forward and the first evaluation at stage 3.

    A fused loss takes a head's weight, an adapter an embedding's, and no hook tells. So the operators of these forwards
    are looked at: a unit is gathered before the first operator that is given its parameters. Later forwards gather it
    together with the root. Units' own forwards are left alone: they may be compiled, and many operators run there.
    """

    def __init__(self, core: CoreEngine, units: UnitModules) -> None:
        self._core = core
        unit_of = units.unit_of_parameters()
        lone = set(units.lone())
        self._parameters = [
            (parameter, unit_of[name])
            for name, parameter in units.modules[0].named_parameters()
            if core.parameters_sharded and unit_of[name] in lone
        ]
        self._unwatched = {True, False}  # whether gradients are recorded
        self._kind = True
        self._found: set[int] = set()
        self._operators: _Operators | None = None
        self._is_entered = False
        self._is_watching = False
        self._open_units = 0

    @property
    def is_watching(self) -> bool:
        """True while a watched forward runs code that belongs to no other unit."""
        return self._is_watching and not self._open_units

    def begin(self) -> None:
        """Watch the forward that begins, if none of its kind has been watched to its end."""
        self.abandon()
        self._kind = torch.is_grad_enabled()
        if self._is_entered or self._kind not in self._unwatched:
            return
        units = {_storage_of(p): unit for p, unit in self._parameters if unit not in self._found}
        if units:
            self._operators = _Operators(self, units)
            self._is_watching = True
            self._enter()

    def end(self) -> None:
        """End the watch, after which no forward of this kind is watched."""
        self._unwatched.discard(self._kind)
        self.abandon()

    def abandon(self) -> None:
        """End the watch of a forward that an error or Ctrl-C ended."""
        self._is_watching = False
        self._open_units = 0
        self._leave()

    def pause(self) -> None:
        """Stop watching until ``resume``: the forward of a unit begins."""
        if self._is_watching:
            self._open_units += 1
            self._leave()

    def resume(self) -> None:
        """End what ``pause`` began."""
        if self._is_watching and self._open_units:
            self._open_units -= 1
            if not self._open_units:
                self._enter()

    def gather(self, unit: int) -> None:
        """Gather a unit that an operator is about to use, if it is the first one."""
        if unit not in self._found:
            self._core.pre_forward_with_root(unit)
            self._found.add(unit)

    def _enter(self) -> None:
        if self._operators is not None and not self._is_entered:
            self._operators.__enter__()
            self._is_entered = True

    def _leave(self) -> None:
        # A mode that somebody else entered since must be left first; until then ours lets everything pass.
        if self._is_entered and _get_current_dispatch_mode() is self._operators:
            assert self._operators is not None
            self._operators.__exit__(None, None, None)
            self._is_entered = False


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, watch: UncalledWatch, units: dict[int, int]) -> None:
        super().__init__()
        self._watch = watch
        self._units = units

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)) if self._watch.is_watching else ():
            if isinstance(value, torch.Tensor):
                unit = self._units.get(_storage_of(value))
                if unit is not None:
                    self._watch.gather(unit)
        return func(*args, **(kwargs or {}))


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the tensor's storage, whose data need not be there; 0 where it has none."""
    if not torch._C._has_storage(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)
