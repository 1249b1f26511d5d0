"""How the words of a command become values."""

from __future__ import annotations

import pytest

from zerobench.cli.main import gather_values
from zerobench.results.setting_values import comma_list


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("--stages 0 1 2", "--stages 0 --stages 1 --stages 2"),
        ("--stages 0,1 3", "--stages 0,1 --stages 3"),
        ("--stages=0 1 --tf32", "--stages=0 --stages 1 --tf32"),
        ("--strategies a b --stages 0", "--strategies a --strategies b --stages 0"),
        ("--config a.json b.json --lr 1 c", "--config a.json --config b.json --lr 1 c"),
        ("--nvme-path=a b", "--nvme-path=a --nvme-path b"),
        ("--stages 0 -1 2", "--stages 0 -1 2"),
        ("--stages 0 -- 1 --config a b", "--stages 0 -- 1 --config a b"),
        ("--stages -- 0", "--stages -- 0"),
        ("--batch-size 4 8", "--batch-size 4 8"),
        ("--stagesx 0 1", "--stagesx 0 1"),
        ("", ""),
    ],
)
def test_values_are_gathered_up_to_the_next_option(given, parsed) -> None:
    assert gather_values(given.split()) == parsed.split()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["0", "1"], "0,1"),
        (["0,1", "3"], "0,1,3"),
        (["0, 1", " 3 "], "0,1,3"),
        (["0,", "1"], "0,1"),
        (["0 1"], "0,1"),
        (["ddp,"], "ddp,"),
        (["a,,b"], "a,,b"),
        ([""], ""),
    ],
)
def test_commas_and_spaces_separate_alike(values, text) -> None:
    assert comma_list(values) == text
