"""Tensors in what modules are given and return."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import types

import pytest
import torch

from zerobench.engine.held_tensors import cast, tensors_in
from zerobench.errors import StateError

Pair = collections.namedtuple("Pair", "x y")


class OwnItems(collections.abc.MutableMapping):
    """Keeps its items in a dict of its own, which copy.copy shares."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@dataclasses.dataclass(eq=False)
class Node:
    x: torch.Tensor
    others: list = dataclasses.field(default_factory=list)


class Slotted:
    __slots__ = ("hidden", "unset")

    def __init__(self, hidden):
        self.hidden = hidden


def test_a_mapping_of_the_callers_keeps_its_dtypes():
    given = OwnItems({"x": torch.ones(2)})
    found = cast(given, torch.bfloat16)
    assert type(found) is OwnItems and found["x"].dtype == torch.bfloat16
    assert given["x"].dtype == torch.float32


def test_what_holds_itself_is_looked_into_once():
    parent = Node(torch.ones(2))
    parent.others = [Node(torch.zeros(3), [parent]), parent.x]
    parent.others.append(parent.others)
    assert sorted(tensor.numel() for tensor in tensors_in([parent, (parent,)])) == [2, 2, 3]
    with pytest.raises(StateError, match='"cast_forward_inputs": false'):
        cast(parent, torch.bfloat16)
    chain = Node(torch.ones(1))
    for _ in range(3000):
        chain = Node(torch.ones(1), [chain])
    assert sum(1 for _ in tensors_in(chain)) == 3001


def test_tensors_are_found_in_all_that_modules_return():
    held = [torch.full((), float(each)) for each in range(9)]
    found = tensors_in(
        (
            held[0],
            {"a": [held[1], {held[2]}]},
            collections.deque([held[3]]),
            collections.UserDict(x=held[4]),
            Node(held[5], [Pair(held[6], "y")]),
            Slotted(held[7]),
            types.SimpleNamespace(inner=(held[8],), module=torch.nn.Linear(2, 2), none=None),
        )
    )
    assert sorted(map(float, found)) == list(range(9))
