"""torch.compile for strategies, with a count of the compiled graphs that really run.

Dynamo's counters of graph breaks stay empty when hooks leave the outer frame eager, and a function that was recompiled
too often runs eagerly from then on without an error. So each compiled graph counts its executions here, and too many
recompilations are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from zerobench.errors import ConfigError
from zerobench.strategies.base import COMPILE_MODES, StrategySettings

_RECOMPILATIONS = 64  # one function may be compiled for training, recomputation and each kind of block


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of one class that follow each other in an nn.ModuleList, outermost lists only."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len({type(item) for item in child}) == 1:
            blocks += child
        else:
            blocks += repeated_blocks(child)
    return blocks


class Compiler:
    """Compiles what ``settings.compile`` names and counts executions of forward graphs."""

    def __init__(self, settings: StrategySettings) -> None:
        if settings.compile not in COMPILE_MODES:
            raise ConfigError(f"unknown compile mode {settings.compile!r}: known: {', '.join(COMPILE_MODES)}")
        self._mode = settings.compile
        self.reset()
        if self._mode == "none":
            return
        import torch._dynamo

        torch._dynamo.reset()  # what an earlier strategy of this process compiled counts for that one
        torch._dynamo.config.recompile_limit = _RECOMPILATIONS
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def reset(self) -> None:
        self.executed_graphs = self._steps = 0

    def count_step(self) -> None:
        self._steps += 1

    def graphs_per_step(self) -> float | None:
        """Since ``reset``; None where nothing is compiled."""
        return self.executed_graphs / self._steps if self._mode != "none" and self._steps else None

    def apply(self, model: nn.Module) -> None:
        """Replace the forward of each repeated block, or of the model, by its compiled form. Call it before anything
        is wrapped or hooked: what hangs on these modules themselves then stays outside, eager."""
        if self._mode == "none":
            return
        modules: list[Any] = repeated_blocks(model) if self._mode == "block" else [model]
        if not modules:
            raise ConfigError(
                f"{type(model).__name__} has no repeated blocks to compile: use --compile whole or remove it"
            )
        # Once a class: each call of torch.compile makes a backend of its own, and the guards of code that was compiled
        # for one block's backend fail for every other block.
        kinds: set[Any] = {type(module) for module in modules}
        forwards = {kind: torch.compile(_inner_forward(kind), backend=self.backend) for kind in kinds}
        for module in modules:
            forward = forwards[type(module)]
            if _inner_forward(type(module)) is not type(module).forward:
                forward = partial(_checkpointed, forward)
            module.forward = MethodType(forward, module)

    def backend(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Inductor, counting each execution of what it compiles. Backward graphs are part of their forward's."""
        import torch._inductor.config
        from torch._dynamo.backends.registry import lookup_backend

        # Before torch 2.13 the cache hands out code for another row's number of threads, unless the number is set.
        torch._inductor.config.cpp.threads = torch.get_num_threads()
        compiled = lookup_backend("inductor")(graph, list(example_inputs))

        def counted(*args: Any) -> Any:
            self.executed_graphs += 1
            return compiled(*args)

        return counted

    def eagerly(self) -> AbstractContextManager[object]:
        """Around passes that are not training, whose other shapes and modes would be compiled too."""
        return nullcontext() if self._mode == "none" else torch.compiler.set_stance("force_eager")


def _inner_forward(kind: Any) -> Any:
    """Without the checkpoint that transformers puts around a layer's forward from 5.2x on. That one looks whether the
    layer's class is still its own, which fully_shard changes, and leaves the checkpoint out where it is not."""
    code = getattr(kind.forward, "__code__", None)
    is_around = code is not None and code.co_name == "forward_with_checkpointing"
    return kind.forward.__wrapped__ if is_around else kind.forward


def _checkpointed(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """As that checkpoint does it; nothing is cached here."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(forward, layer, **kwargs), *args)
    return forward(layer, *args, **kwargs)
