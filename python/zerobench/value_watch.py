"""Notices parameters that a script changes by way of ``parameter.data``, which torch keeps no version of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from zerobench.errors import StateError

_SAMPLE_NUMEL = 16


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
        self._seen: dict[str, torch.Tensor] = {}

    @property
    def has_seen(self) -> bool:
        """Whether values are there to compare with."""
        return bool(self._seen)

    def forget(self) -> None:
        """Compare with nothing until ``remember`` is called."""
        self._seen = {}

    def remember(self, is_wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Take the present values for what the last update left, of parameters with such names, which can be read."""
        self._seen = self._samples(name for name in self._views if is_wanted(name))

    def check(self, cure: str) -> None:
        """Raise StateError where a parameter has other values than were remembered. Waits for the device."""
        now = self._samples(self._seen)
        if not self._seen or torch.equal(_bits(now), _bits(self._seen)):
            return
        for name, seen in self._seen.items():
            if not torch.equal(seen.view(torch.uint8), now[name].view(torch.uint8)):
                self.remember(self._seen.keys().__contains__)  # told once
                raise StateError(
                    f"parameter '{name}' was changed through its .data, and the engine keeps values of its own: {cure}"
                )

    def _samples(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        views = {name: self._views[name] for name in names}
        if not views:
            return {}
        together = torch.cat(list(views.values()))  # a copy, in one piece of work
        parts = together.split([view.numel() for view in views.values()])
        return dict(zip(views, parts, strict=True))


def _is_held(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and not parameter.is_inference()


def _few_of(parameter: nn.Parameter) -> torch.Tensor:
    stride = max(parameter.numel() // _SAMPLE_NUMEL, 1)
    return parameter.detach().view(-1)[::stride][:_SAMPLE_NUMEL]


def _bits(samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([sample.view(torch.uint8) for sample in samples.values()])
