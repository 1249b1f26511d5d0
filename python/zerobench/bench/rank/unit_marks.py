"""When the host enters and leaves units of a model: its repeated blocks, and the root for all else."""

from __future__ import annotations

import time
from bisect import bisect_right
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from zerobench.bench.rank.intervals import Interval

ROOT = "root"
_WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class UnitMarks:
    """Records marks while it is entered. Neither the model nor its graph changes: hooks are torch's global ones, and
    the backward of a unit begins when the gradient of its output is there."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, str]] = [(0, ROOT)]
        self._units: dict[nn.Module, str] = {}
        self._known: set[nn.Module] = set()
        self._roots: set[nn.Module] = set()
        self._in_backward = False
        self._last_output: torch.Tensor | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> UnitMarks:
        self._handles = [
            torch_modules.register_module_forward_pre_hook(self._enter_module),
            torch_modules.register_module_forward_hook(self._leave_module),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._units, self._known, self._roots, self._last_output = {}, set(), set(), None

    def unit_at(self, time_ns: float) -> str:
        return self._marks[bisect_right(self._marks, time_ns, key=lambda mark: mark[0]) - 1][1]

    def split(self, begin_ns: float, end_ns: float) -> list[tuple[str, Interval]]:
        """Return the stretches of a time, each with its unit."""
        inside = [mark for mark in self._marks if begin_ns < mark[0] < end_ns]
        cuts = [(begin_ns, self.unit_at(begin_ns)), *inside]
        ends = [mark[0] for mark in inside] + [end_ns]
        return [(unit, (begin, end)) for (begin, unit), end in zip(cuts, ends, strict=True)]

    def begin_step(self) -> None:
        """Go back to the root: what comes next belongs to no unit yet."""
        self._in_backward = False
        self._mark(ROOT)

    def _mark(self, unit: str) -> None:
        self._marks.append((time.perf_counter_ns(), unit))

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if module not in self._known:
            self._learn(module)
        if module in self._roots:
            self.begin_step()
        if module not in self._units or self._in_backward:  # in backward it recomputes
            return
        self._mark(self._units[module])
        tensor = _first_tensor(inputs)
        if tensor is not None and tensor is not self._last_output:
            tensor.register_hook(lambda _: self._begin_backward(ROOT))

    def _leave_module(self, module: nn.Module, _: Any, output: Any) -> None:
        if module not in self._units or self._in_backward:
            return
        unit = self._units[module]
        self._mark(ROOT)
        self._last_output = _first_tensor(output)
        if self._last_output is not None:
            self._last_output.register_hook(lambda _: self._begin_backward(unit))

    def _begin_backward(self, unit: str) -> None:
        self._in_backward = True
        self._mark(unit)

    def _learn(self, root: nn.Module) -> None:
        """Take the items of the root's outermost module lists for units."""
        self._roots.add(root)
        lists: list[str] = []
        for name, module in root.named_modules():
            self._known.add(module)
            if any(name.startswith(outer) for outer in lists):
                continue
            if isinstance(module, nn.ModuleList):
                lists.append(f"{name}.")
                for index, item in enumerate(module):
                    self._units[item] = _bare(f"{name}.{index}")


def _first_tensor(values: Any) -> torch.Tensor | None:
    """Return the tensor, or the first of several, where it gets a gradient."""
    first = values[0] if isinstance(values, tuple) and values else values
    return first if isinstance(first, torch.Tensor) and first.requires_grad else None


def _bare(name: str) -> str:
    """Return a module's name without the parts that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
