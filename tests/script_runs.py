"""Checks of training scripts on ranks: which run in which place on how many ranks, and what they end with.

Every place and every precision has its turn; all of them on every number of ranks would take minutes. All checks of a
test file and a number of ranks share one group of processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import ranks
import script_engines

Check = Callable[..., Any]
Run = tuple[Check, tuple[Any, ...]]
Outcomes = list[list[tuple[str | None, Any]]]
"""By rank and check, the error that the check raised, and what it returned."""

PLACES_OF = {
    1: ("0", "2", "3", "3 host", "2 nvme"),
    2: ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme"),
    3: ("1", "2", "3", "1 host"),
}


def chosen(
    checks: Sequence[Run],
    *,
    several_ranks: Collection[Check] = (),
    on_two_places: Collection[Check] = (),
    swapped: Collection[Check] = (),
    rule: Callable[..., bool | None] = lambda *_: None,
) -> dict[int, list[Run]]:
    """Return the checks that run, by the number of ranks.

    ``several_ranks``: checks that one rank cannot fail. ``on_two_places``: those that run in two places on three ranks.
    ``swapped``: those that run with all state on NVMe, which is slow, and the swap files' own tests train every kind of
    model. ``rule(world_size, check, place, *arguments)``: whether a check runs, or None where the usual places hold."""

    def is_run(world_size: int, check: Check, place: str, *arguments: Any) -> bool:
        if world_size == 1 and check in several_ranks:
            return False
        if any(str(each).split()[-1] in ("bf16", "fp16") for each in arguments):
            return place in (("0", "1", "3", "2 host") if world_size == 2 else ("3",))
        if place == "3 nvme":
            return world_size == 2 and check in swapped
        own = rule(world_size, check, place, *arguments)
        if own is not None:
            return own
        if world_size == 3 and check in on_two_places:
            return place in ("3", "1 host")
        return place in PLACES_OF[world_size]

    return {
        world_size: [
            (check, arguments) for check, arguments in checks if is_run(world_size, check, *arguments)
        ]
        for world_size in PLACES_OF
    }


def parameters(runs: dict[int, list[Run]]) -> list[Any]:
    """Return the parameters of a test of all runs: number of ranks, and index among its checks."""
    return [
        pytest.param(world_size, index, id=f"{check.__name__}-{'-'.join(map(str, arguments))}-{world_size}")
        for world_size, checks in runs.items()
        for index, (check, arguments) in enumerate(checks)
    ]


def outcomes_of(
    runs: dict[int, list[Run]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Outcomes]:
    """Return the function that runs all checks of a number of ranks, once, and returns their outcomes."""
    folder = str(tmp_path_factory.mktemp("swap"))

    @functools.cache
    def run(world_size: int) -> Outcomes:
        return ranks.run(
            script_engines.run_all, runs[world_size], folder, world_size=world_size, timeout_s=280.0
        )

    return run


def expect_passed(outcomes: Outcomes, index: int) -> None:
    """Raise AssertionError if a check failed on a rank, or returned other values on some ranks."""
    of_check = [of_rank[index] for of_rank in outcomes]
    for rank, (error, _) in enumerate(of_check):
        assert error is None, f"rank {rank}: {error}"
    assert len({repr(value) for _, value in of_check}) == 1, "ranks end differently"
