"""A backward through an engine without trainable parameters, towards its inputs, where parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zerobench.engine.held_tensors import tensors_in

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine


class InputBackward:
    """Begins where backward first reaches the model, and ends with autograd's backward.

    Autograd tells nobody when a backward ends by an exception: then the engine's next call ends it (``end``).
    ``enter_stream`` tells the core which stream the caller computes on.
    """

    def __init__(self, core: CoreEngine, enter_stream: Callable[[], None]) -> None:
        self._core = core
        self._enter_stream = enter_stream
        self._is_open = False

    def watch(self, given: Any, output: Any) -> None:
        """Begin when a backward reaches what a forward of the model has made of ``given``."""
        for node in _nodes_in(output) - _nodes_in(given):
            node.register_prehook(self.begin)

    def begin(self, _gradients: Any = None) -> None:
        """Begin, unless that has happened. For hooks of autograd's nodes. Collective."""
        if self._is_open:
            return
        self._enter_stream()
        self._core.begin_input_backward()
        self._is_open = True
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """End, and reshard what it has gathered; do nothing where none has begun. Collective."""
        if self._is_open:
            self._is_open = False
            self._core.end_input_backward()


def _nodes_in(value: Any) -> set[Any]:
    """Return the nodes of these tensors and of what they are views of, which a change in place leaves."""
    tensors = list(tensors_in(value))
    tensors += [tensor._base for tensor in tensors if tensor._base is not None]
    return {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
