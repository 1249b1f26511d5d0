"""Hooks on a model's modules that tell the core when forwards begin and end, and when backward reaches a unit."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerobench.engine.held_tensors import cast, tensors_in
from zerobench.engine.input_backward import InputBackward
from zerobench.engine.uncalled_watch import UncalledWatch
from zerobench.engine.units import UnitModules
from zerobench.errors import StateError

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine

# Dynamo would make graphs of what hooks do, and new ones whenever the tensors that they are called with have
# other ids, wherever a call of the module is compiled and not its forward alone.
_NOT_COMPILED = torch.compiler.disable(
    reason="an engine's hook, which no graph can hold: compile each block's forward before "
    "zerobench.initialize, or at stages 0 to 2 call engine.compile()"
)


class ModuleHooks:
    """The hooks of one engine. A forward that ends by an exception is ended in the core too.

    ``enter`` is called before each forward, ``arrived`` when updates are found to have arrived. Floating-point inputs
    are cast to ``input_dtype``, if there is one. ``trains`` is false for an engine without trainable parameters, whose
    backwards ``input_backward`` begins where parameters are sharded. ``may_load`` is set while values that are loaded
    into the model reach the engine.
    """

    def __init__(
        self,
        core: CoreEngine,
        *,
        units: UnitModules,
        input_dtype: torch.dtype | None,
        enter: Callable[[], None],
        arrived: Callable[[], None],
        trains: bool,
        input_backward: InputBackward | None,
    ) -> None:
        self._core = core
        self._trains = trains
        self._input_backward = input_backward
        self._arrived = arrived
        self._input_dtype = input_dtype
        self._enter = enter
        self._unit_num = len(units.names)
        self._updates = 0
        self._begin_failed = False
        self._error_before_forward: BaseException | None = None
        self._running: tuple[int, FrameType] | None = None  # thread and caller of the forward under way
        self._awaited_at_once: list[int] = []
        self._unit_handles: list[Any] = []
        root = units.modules[0]
        begin = root.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True)
        self._watch = UncalledWatch(core, units)
        self._of_units = [
            UnitHooks(core, unit, self._watch, input_backward) for unit in range(1, self._unit_num)
        ]
        for hooks, module in zip(self._of_units, units.modules[1:], strict=True):
            self._install(hooks, module)
        self._handles = [
            begin,
            root.register_forward_hook(self._end_forward, with_kwargs=True, always_call=True),
        ]
        for module in root.modules():
            # Models share modules that hold nothing, such as transformers' activations.
            if module is not root and not any(True for _ in module.parameters()):
                continue
            self._handles += [
                module.register_state_dict_pre_hook(self._expect_readable),
                module.register_load_state_dict_pre_hook(self._expect_may_load),
            ]
        self.may_load = False

    def await_units_at_once(self) -> None:
        """From now on a forward begins when every unit is there, and no hook lies inside it."""
        for handle in self._unit_handles:
            handle.remove()
        self._unit_handles.clear()
        self._awaited_at_once = list(range(1, self._unit_num))

    @property
    def are_installed(self) -> bool:
        """True while the engine trains the model."""
        return bool(self._handles)

    def remove(self) -> None:
        """Leave the modules without hooks."""
        for handle in (*self._handles, *self._unit_handles):
            handle.remove()
        self._handles.clear()
        self._unit_handles.clear()

    def __reduce__(self) -> Any:
        raise _no_copies()

    def parameters_changed(self) -> None:
        """Record that a step or a loaded state changed the parameters: graphs of earlier forwards are stale now."""
        self._updates += 1

    def _expect_readable(self, *_: Any) -> None:
        expect_not_updating(self._core)
        self._arrived()

    def _expect_may_load(self, *_: Any) -> None:
        if not self.may_load:
            raise StateError(
                "loading into the model alone does not update the masters, and the next step would undo it: "
                "call engine.load_state_dict(), or load inside `with engine.gather(modifier_rank=0):`, on every rank"
            )

    def _install(self, hooks: UnitHooks, module: nn.Module) -> None:
        # Before the hooks that are there: those of torch.nn.utils.weight_norm, say, read the module's parameters.
        if not self._core.parameters_sharded:  # then nothing happens behind a unit's forward
            self._unit_handles.append(module.register_forward_pre_hook(hooks.before, prepend=True))
            return
        self._unit_handles += [
            module.register_forward_pre_hook(hooks.before_sharded, with_kwargs=True, prepend=True),
            module.register_forward_hook(hooks.after_sharded, always_call=True),
        ]

    @_NOT_COMPILED
    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._error_before_forward = sys.exc_info()[1]
        self._enter()
        self._end_interrupted()
        try:
            self._core.begin_forward(train=self._trains and torch.is_grad_enabled())
        except BaseException:
            self._begin_failed = True  # the hook that ends forwards must leave the running one alone
            raise
        self._running = threading.get_ident(), sys._getframe(2)  # 1 is _NOT_COMPILED's
        for hooks in self._of_units:
            hooks.forget_inputs()
        try:
            self._core.pre_forward(0)
            for unit in self._awaited_at_once:
                self._core.pre_forward(unit)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._core.abandon_forward()
            raise
        given = None if self._input_dtype is None else cast((args, kwargs), self._input_dtype)
        self._watch.begin()
        return given

    @_NOT_COMPILED
    def _end_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._begin_failed:
            self._begin_failed = False
            return
        self._running = None
        if sys.exc_info()[1] is self._error_before_forward:
            self._watch.end()
            self._core.post_forward(0)
            self._core.end_forward()
            if torch.is_grad_enabled():
                self._watch_age((args, kwargs), output)
                if self._input_backward is not None:
                    self._input_backward.watch((args, kwargs), output)
            return
        self._watch.abandon()
        with contextlib.suppress(Exception):  # the error that ends this forward is the one to report
            self._core.abandon_forward()

    def _end_interrupted(self) -> None:
        """Torch calls no hooks where Ctrl-C ends a forward, and the engine saw none of one within, say, generate()."""
        if self._running is None or self._running[0] != threading.get_ident():
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._running[1]:
            frame = frame.f_back
        if frame is None:
            self.forward_interrupted()

    def forward_interrupted(self) -> None:
        """End a forward that Ctrl-C ended; does nothing outside one."""
        self._running = None
        self._watch.abandon()
        # The interrupt is the error to report; the next call finds one of the core, too.
        with contextlib.suppress(Exception):
            self._core.abandon_forward()

    def _watch_age(self, given: Any, output: Any) -> None:
        """torch would see that a backward comes too late by versions, which the core's updates leave as they are."""
        expect_fresh = functools.partial(self._expect_fresh, self._updates)
        passed_on = {tensor.grad_fn for tensor in tensors_in(given)}
        for node in {tensor.grad_fn for tensor in tensors_in(output)} - passed_on:
            if node is not None:
                node.register_prehook(expect_fresh)

    def _expect_fresh(self, updates: int, _: Any) -> None:
        if updates != self._updates:
            raise StateError(
                "backward reached a forward from before the last step, which has changed the parameters since, so its "
                "gradients would be wrong; call the engine again after each step, and backward before the next step"
            )


class UnitHooks:
    """The hooks of one unit."""

    def __init__(
        self, core: CoreEngine, unit: int, watch: UncalledWatch, input_backward: InputBackward | None
    ) -> None:
        self._core = core
        self._unit = unit
        self._watch = watch
        self._input_backward = input_backward
        self._is_frozen = core.has_frozen(unit)
        # By unit forward under way, since a unit may call itself: what was given, by id, with its version.
        self._inputs: list[dict[int, tuple[torch.Tensor, int]]] = []

    def __reduce__(self) -> Any:
        raise _no_copies()

    def forget_inputs(self) -> None:
        """Forget the inputs of forwards that Ctrl-C ended, for which torch calls no hooks."""
        self._inputs.clear()

    @_NOT_COMPILED
    def before(self, module: nn.Module, args: Any) -> None:
        self._core.pre_forward(self._unit)

    @_NOT_COMPILED
    def before_sharded(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs: dict[int, tuple[torch.Tensor, int]] = {}
        self._inputs.append(inputs)  # whatever comes: torch calls the other hook after an error, too
        self._watch.pause()
        self._core.pre_forward(self._unit)
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                inputs[id(tensor)] = (tensor, tensor._version)
        if self._is_frozen and inputs:
            self._core.await_inputs(self._unit)
            given = [tensor for tensor, _ in inputs.values()]
            # A hook on a parameter would stay there and speak of this forward in backwards of others. Its gradient is
            # complete when all of backward is about over, and then units are resharded anyway.
            if not any(isinstance(tensor, nn.Parameter) for tensor in given):
                torch.autograd.graph.register_multi_grad_hook(
                    given, lambda _: self._core.inputs_done(self._unit)
                )

    @_NOT_COMPILED
    def after_sharded(self, module: nn.Module, args: Any, output: Any) -> None:
        inputs = self._inputs.pop() if self._inputs else {}
        self._core.post_forward(self._unit)
        self._watch.resume()
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            # What was passed through may have its gradient complete long after backward has left this unit.
            if id(tensor) in inputs and inputs[id(tensor)][1] == tensor._version:
                continue
            # Nodes' hooks run after tensors' hooks, so a frozen unit behind this one is resharded before.
            # Behind a tensor without a node, such as a parameter of its own, backward goes no further.
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._before_backward)
            # A view that the model changes in place gets another node, behind which backward comes to its base's.
            base = tensor._base
            if base is not None and base.grad_fn is not None and not _were_given(base, inputs):
                base.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, _: Any) -> None:
        if self._input_backward is not None:
            self._input_backward.begin()
        self._core.pre_backward(self._unit)


def _no_copies() -> StateError:
    return StateError(
        "a model that an engine trains cannot be copied or pickled: copy it before zerobench.initialize, or load "
        "engine.state_dict() into a new one"
    )


def expect_not_updating(core: CoreEngine) -> None:
    """Raise StateError where the last step's updates are under way and this rank cannot end them alone."""
    if not core.try_wait_updates():
        raise StateError(
            "the last step's updates are still under way, and other ranks take part in them: call "
            "engine.state_dict(), or read the model inside `with engine.gather():`, on every rank"
        )


def _were_given(base: torch.Tensor, inputs: dict[int, tuple[torch.Tensor, int]]) -> bool:
    """Return whether ``base`` or a view of it is among the inputs and has not changed since."""
    return any(
        (given is base or given._base is base) and version == base._version
        for given, version in inputs.values()
    )
