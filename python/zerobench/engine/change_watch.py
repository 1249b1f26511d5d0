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
        self._reported: set[str] = set()
        self._steps = 0
        self.accept()

    def accept(self, is_accepted: Callable[[str], bool] = lambda name: True) -> None:
        """Record that the engine knows the present values of parameters with such names."""
        accepted = {p: name for p, name in self._names.items() if is_accepted(name)}
        self._versions |= {p: p._version for p in accepted}
        self._reported -= set(accepted.values())

    def step_ended(self) -> None:
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """True if the running step is one that is checked."""
        return self._steps < self.first_steps or self._steps % self.steps_a_check == 0

    def check(self, cure: str) -> None:
        """Raise StateError where a parameter was changed, in those steps that are looked at."""
        if self.is_due:
            self.expect_same(lambda _: True, cure)

    def changed_names(self) -> list[str]:
        """Return the names of parameters that were changed and not accepted since."""
        changed = [each for each, version in self._versions.items() if each._version != version]
        return [self._names[parameter] for parameter in changed]

    def expect_same(self, is_asked: Callable[[str], bool], cure: str, *, repeats: bool = True) -> None:
        """Raise StateError, which names ``cure``, if a parameter with such a name was changed. Without ``repeats``,
        changes that were reported before raise no error."""
        changed = [name for name in self.changed_names() if is_asked(name)]
        if not repeats and self._reported.issuperset(changed):
            return
        self._reported.update(changed)  # one error is enough: a script mends them together
        if changed:
            raise StateError(
                f"parameter '{changed[0]}' was changed in place outside of the engine, which keeps values of its own: "
                f"{cure}"
            )
