"""Notices about parameters that training leaves out: those without a gradient, and those that came too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from zerobench.engine.known_parameters import KnownParameters
from zerobench.engine.notices import Notices

_MOST_NAMES = 5


class LeftOut:
    """Warns of trained parameters that get no gradient, and of parameters that came too late to be trained.

    For rank 0 alone, since ranks train the same model: a parameter without a gradient on every rank has none there.
    Each parameter has a hook until its first gradient comes, so later backwards cost nothing.
    """

    first_steps: ClassVar[int] = 10
    steps_a_look: ClassVar[int] = 100  # for late parameters: listing them takes about a millisecond

    def __init__(self, known: KnownParameters, notices: Notices) -> None:
        self._known = known
        self._notices = notices
        self._steps = 0
        self._named: set[str] = set()  # parameters that came too late
        self._arrived: set[nn.Parameter] = set()
        self._waiting = {
            parameter: parameter.register_hook(_note_arrival(self._arrived, parameter))
            for parameter in known.trained
        }

    def backward_ended(self) -> None:
        """Take the hooks off the parameters whose first gradient came."""
        for parameter in self._arrived:
            self._take_hook(parameter)
        self._arrived.clear()

    def step_ended(self) -> None:
        """Count a step, and warn where it is one that is looked at."""
        self._steps += 1
        if self._steps == self.first_steps:
            self._warn_without_gradient(f"the first {self._steps} steps")
        if self._steps in (1, self.first_steps) or self._steps % self.steps_a_look == 0:
            self._warn_late()

    def close(self) -> None:
        """Warn of what is left out at the end of training, and take off all hooks."""
        self.backward_ended()
        if self._steps:
            self._warn_without_gradient(f"any of {self._steps} steps" if self._steps > 1 else "the only step")
            self._warn_late()
        for parameter in list(self._waiting):
            self._take_hook(parameter)

    def _take_hook(self, parameter: nn.Parameter) -> None:
        self._waiting.pop(parameter).remove()
        if not parameter._backward_hooks:
            parameter._backward_hooks = None  # else every backward calls into Python for an empty dict

    def _warn_without_gradient(self, when: str) -> None:
        names = [self._known.trained[parameter] for parameter in self._waiting]
        if names:
            self._notices.warn(
                f"no gradient came on this rank in {when} for {_listed('trained parameter', names)}. A step takes a "
                "missing gradient as zero, so weight decay still applies. Use them in the forward, or call "
                "requires_grad_(False) on them before zerobench.initialize."
            )

    def _warn_late(self) -> None:
        names = [name for name in self._known.late_names() if name not in self._named]
        if names:
            self._named.update(names)
            self._notices.warn(
                f"the engine does not train {_listed('parameter', names)}, added to the model after "
                "zerobench.initialize. Add them before, and train with a new engine after such a change."
            )


def _note_arrival(arrived: set[nn.Parameter], parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
    @unserializable_hook  # else torch warns where a script saves the parameter
    def note(_: torch.Tensor) -> None:
        arrived.add(parameter)

    return note


def _listed(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{len(names)} {what}{'s' * (len(names) > 1)}: {shown}{more}"
