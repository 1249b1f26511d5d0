"""Notices parameters that a script changes by way of ``parameter.data``, which torch keeps no version of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from zerobench.errors import StateError

_SAMPLE_NUMEL = 16

Samples = dict[str, torch.Tensor]


class ValueWatch:
    """Compares a few elements of each trained parameter with those that the last update left there.

    For parameters whose masters are kept apart, or that are sharded: there the next step, or the end of a gather, would
    undo the change. Where the parameter is its own master the change is right, and nobody looks.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        # Views share the parameters' storages, so they follow where the engine moves them.
        self._views = {
            name: _few_of(parameter)
            for parameter, name in names.items()
            if parameter.numel() and _is_held(parameter)
        }
        self._left: Samples = {}
        self._is_reported = False

    @property
    def has_values(self) -> bool:
        """True if the values that the last update left are known."""
        return bool(self._left)

    def forget(self) -> None:
        """Compare with nothing until ``remember`` is called."""
        self._left = {}
        self._is_reported = False

    def remember(self) -> None:
        """Record the present values, which can be read, as those that the last update left."""
        self._left = self.sample()
        self._is_reported = False

    def check(self, cure: str, *, but: Collection[str] = (), repeats: bool = True) -> None:
        """Raise StateError, which names ``cure``, if a parameter that is not in ``but`` has other values than the last
        update left. Without ``repeats``, a change that was reported before raises no error. Waits for the device."""
        if self._is_reported and not repeats:
            return
        self._is_reported = True
        self.expect_same({name: values for name, values in self._left.items() if name not in but}, cure)
        self._is_reported = False

    def mark_reported(self) -> None:
        """Record that the present changes were reported."""
        self._is_reported = True

    def sample(self, is_wanted: Callable[[str], bool] = lambda name: True) -> Samples:
        """Return copies of a few elements of each parameter with such a name, which can be read."""
        views = {name: view for name, view in self._views.items() if is_wanted(name)}
        if not views:
            return {}
        together = torch.cat(list(views.values()))  # in one piece of work
        parts = together.split([view.numel() for view in views.values()])
        return dict(zip(views, parts, strict=True))

    def expect_same(self, before: Samples, cure: str) -> None:
        """Raise StateError, which names ``cure``, if a parameter has other values than ``before``. Waits for the
        device."""
        if not before:
            return
        now = self.sample(before.__contains__)
        if torch.equal(_bits(now), _bits(before)):
            return
        name = next(name for name in before if not torch.equal(_bits_of(now[name]), _bits_of(before[name])))
        raise StateError(
            f"parameter '{name}' was changed through its .data, and the engine keeps values of its own: {cure}"
        )


def _is_held(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and not parameter.is_inference()


def _few_of(parameter: nn.Parameter) -> torch.Tensor:
    stride = max(parameter.numel() // _SAMPLE_NUMEL, 1)
    return parameter.detach().view(-1)[::stride][:_SAMPLE_NUMEL]


def _bits(samples: Samples) -> torch.Tensor:
    return torch.cat([_bits_of(sample) for sample in samples.values()])


def _bits_of(sample: torch.Tensor) -> torch.Tensor:
    return sample.view(torch.uint8)  # NaN equals itself
