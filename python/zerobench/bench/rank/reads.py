"""Record what a forward reads, by hooks on the modules that hold parameters: each should be its master, rounded. Also
record the dtype in which it computes its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

_CHUNK_NUMEL = 1 << 22  # compared at a time, so that a full device has room for it
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Read(NamedTuple):
    name: str
    numel: int
    differing: torch.Tensor  # elements, a number on the device


class WorstRead(NamedTuple):
    share: float  # of the parameter's elements, that were not the master's
    name: str


class Reads:
    """Every parameter that was seen while a forward ran, against its master."""

    def __init__(self, masters: Mapping[str, torch.Tensor]) -> None:
        self.loss_dtype: torch.dtype | None = None  # of the last forward
        self._masters = masters
        self._seen: list[Read] = []

    def look(self, names: Mapping[str, str], module: nn.Module, *_: Any) -> None:
        """A pre-hook behind those that gather: ``names`` of masters by attribute."""
        for attribute, name in names.items():
            tensor, master = getattr(module, attribute), self._masters[name]
            # A module that is not gathered as a whole gathers elsewhere, where no hook sees it.
            if isinstance(tensor, DTensor) or tensor.shape != master.shape:
                continue
            self._seen.append(Read(name, master.numel(), differing(tensor.detach(), master)))

    def look_at_loss(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook behind the model's forward."""
        self.loss_dtype = output.loss.dtype

    @property
    def names(self) -> set[str]:
        return {read.name for read in self._seen}

    def worst(self) -> WorstRead | None:
        """None where no parameter was seen."""
        found = (WorstRead(int(read.differing) / max(read.numel, 1), read.name) for read in self._seen)
        return max(found, key=lambda read: read.share, default=None)


def differing(tensor: torch.Tensor, master: torch.Tensor, *, chunk_numel: int = _CHUNK_NUMEL) -> torch.Tensor:
    """How many elements of ``tensor`` are not those of ``master`` (fp32, perhaps on the host) in its dtype. NaN never
    is. ``chunk_numel`` elements are compared at a time."""
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    pairs = zip(tensor.reshape(-1).split(chunk_numel), master.reshape(-1).split(chunk_numel), strict=True)
    for part, expected in pairs:
        found += (part != expected.to(part.device).to(part.dtype)).sum()
    return found


@contextlib.contextmanager
def watched(module: nn.Module, masters: Mapping[str, torch.Tensor]) -> Iterator[Reads]:
    """Look at what forwards of ``module`` read from here on: its parameters have the names of ``masters``, but for what
    wrappers around inner modules put between."""
    reads = Reads(masters)
    by_module = attributes(module, masters)
    handles: list[RemovableHandle] = [
        inner.register_forward_pre_hook(partial(reads.look, by_module[plain]))
        for path, inner in module.named_modules()
        if (plain := without_wrappers(path)) in by_module and _holds(inner, by_module[plain])
    ]
    handles.append(module.register_forward_hook(reads.look_at_loss))
    try:
        yield reads
    finally:
        for handle in handles:
            handle.remove()


def attributes(module: nn.Module, masters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, str]]:
    """{path of a module: {attribute: name of a master}}, those of tied parameters included."""
    places: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(without_wrappers(name))
    masters_of = {name: name for name in masters}
    for tied in places.values():
        owner = next((name for name in tied if name in masters), None)
        if owner is not None:
            masters_of |= dict.fromkeys(tied, owner)
    found: dict[str, dict[str, str]] = {}
    for name, master in masters_of.items():
        path, _, attribute = name.rpartition(".")
        found.setdefault(path, {})[attribute] = master
    return found


def without_wrappers(path: str) -> str:
    whole = f"{path}."
    for wrapper in _WRAPPERS:
        whole = whole.replace(wrapper, "")
    return whole[:-1]


def _holds(module: nn.Module, names: Iterable[str]) -> bool:
    """Not a wrapper of the module that does, which has its path."""
    return all(
        isinstance(vars(module).get(name, module._parameters.get(name)), torch.Tensor) for name in names
    )
