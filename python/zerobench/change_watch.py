"""Notices parameters that a script or the model itself changes in place behind the engine, where no update sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import nn

from zerobench.errors import StateError


class ChangeWatch:
    """The core writes parameters behind torch's back, so a new version is somebody else's change.

    Looked at in the first steps, in which models set what a forward sets, and then seldom, since reaching each tensor
    takes long (some 30 us for 300). What is written by way of ``parameter.data`` is not seen.
    """

    first_steps: ClassVar[int] = 3
    steps_a_check: ClassVar[int] = 100

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = {
            parameter: name
            for parameter, name in names.items()
            if parameter.is_floating_point() and not parameter.is_inference()
        }
        self._versions: dict[nn.Parameter, int] = {}
        self._steps = 0
        self.accept()

    def accept(self, is_accepted: Callable[[str], bool] = lambda name: True) -> None:
        """What was changed so far, of parameters with such names, is known to the engine."""
        self._versions |= {p: p._version for p, name in self._names.items() if is_accepted(name)}

    def step_ended(self) -> None:
        self._steps += 1

    def check(self) -> None:
        """Raise StateError where a parameter was changed, in those steps that are looked at."""
        if self._steps >= self.first_steps and self._steps % self.steps_a_check:
            return
        for parameter in [each for each, version in self._versions.items() if each._version != version]:
            raise StateError(
                f"parameter '{self._names[parameter]}' was changed in place behind the engine, which keeps values of "
                "its own: change it inside `with engine.gather(modifier_rank=0):`, on every rank; a module that sets "
                "parameters in its first forward has that forward there, before training"
            )
