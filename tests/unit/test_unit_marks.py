"""Marks of when the host enters units of a model."""

from __future__ import annotations

import pytest
import torch
from builders import tiny_model
from torch import nn

from zerobench import models
from zerobench.bench.rank.unit_marks import ROOT, UnitMarks


def order(marks: UnitMarks) -> list[str]:
    """Return the units in the order of their marks, each stay once."""
    units = [unit for _, unit in marks._marks]
    return [unit for index, unit in enumerate(units) if index == 0 or unit != units[index - 1]]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(8).reshape(1, 8)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_units_follow_each_other_forwards_and_then_backwards(checkpointing) -> None:
    config = models.resolve("tiny", {"num_layers": 2, "hidden_size": 16})
    model = models.build(config, 0, checkpointing=checkpointing)
    with UnitMarks() as marks:
        model(**batch()).loss.backward()
    forward = [ROOT, "blocks.0", ROOT, "blocks.1", ROOT]
    assert order(marks) == [*forward, "blocks.1", "blocks.0", ROOT]


def test_a_second_forward_begins_at_the_root() -> None:
    model = tiny_model(num_layers=1, hidden_size=16)
    with UnitMarks() as marks:
        for _ in range(2):
            model(**batch()).loss.backward()
    assert order(marks) == [ROOT, "blocks.0", ROOT, "blocks.0", ROOT, "blocks.0", ROOT, "blocks.0", ROOT]


def test_nothing_is_left_on_the_model() -> None:
    model = nn.Linear(2, 2)
    with UnitMarks() as marks:
        pass
    model(torch.ones(2))
    assert order(marks) == [ROOT]


def test_a_time_is_split_where_units_change() -> None:
    marks = UnitMarks()
    marks._marks += [(10, "a"), (20, ROOT), (30, "b")]
    assert marks.split(5, 25) == [(ROOT, (5, 10)), ("a", (10, 20)), (ROOT, (20, 25))]
    assert marks.split(12, 15) == [("a", (12, 15))]
