"""Checks of training scripts on ranks: which run in which place on how many ranks, and what they end with.

Every place and every precision has its turn; all of them on every number of ranks would take minutes. All checks of a
test file and a number of ranks share one group of processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import ranks
import script_engines

Check = Callable[..., Any]

PLACES_OF = {
    1: ("0", "2", "3", "3 host", "2 nvme"),
    2: ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme"),
    3: ("1", "2", "3", "1 host"),
}
LOW_PLACES_OF = {1: ("3",), 2: ("0", "1", "3", "2 host"), 3: ("3",)}
"""Places of checks in bf16 and fp16."""


class Runs:
    """The checks of a test file that run, by the number of ranks, and their outcomes.

    ``several_ranks``: checks that one rank cannot fail. ``on_two_places``: those that run in two places on three ranks.
    ``swapped``: those that run with all state on NVMe, which is slow, and the swap files' own tests train every kind of
    model. ``rule(world_size, check, place, *arguments)``: whether a check runs, or None where the usual places hold."""

    def __init__(
        self,
        checks: Sequence[tuple[Check, tuple[Any, ...]]],
        *,
        several_ranks: Collection[Check] = (),
        on_two_places: Collection[Check] = (),
        swapped: Collection[Check] = (),
        rule: Callable[..., bool | None] = lambda *_: None,
    ) -> None:
        def is_run(world_size: int, check: Check, place: str, *arguments: Any) -> bool:
            if world_size == 1 and check in several_ranks:
                return False
            if any(str(each).split()[-1] in ("bf16", "fp16") for each in arguments):
                return place in LOW_PLACES_OF[world_size]
            if place == "3 nvme":
                return world_size == 2 and check in swapped
            own = rule(world_size, check, place, *arguments)
            if own is not None:
                return own
            if world_size == 3 and check in on_two_places:
                return place in ("3", "1 host")
            return place in PLACES_OF[world_size]

        self.checks = {
            world_size: [
                (check, arguments) for check, arguments in checks if is_run(world_size, check, *arguments)
            ]
            for world_size in PLACES_OF
        }
        # By the number of ranks, and then by rank and check: the error that the check raised, and what it returned.
        self._outcomes: dict[int, list[list[tuple[str | None, Any]]]] = {}

    def parameters(self) -> list[Any]:
        """Return the parameters of a test of all runs: number of ranks, and index among its checks."""
        return [
            pytest.param(
                world_size, index, id=f"{check.__name__}-{'-'.join(map(str, arguments))}-{world_size}"
            )
            for world_size, checks in self.checks.items()
            for index, (check, arguments) in enumerate(checks)
        ]

    def expect_passed(self, world_size: int, index: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Raise AssertionError if a check failed on a rank, or returned other values on some ranks. The first call
        runs all checks of this number of ranks; swap files go to a folder of ``tmp_path_factory``."""
        if world_size not in self._outcomes:
            folder = str(tmp_path_factory.mktemp("swap"))
            self._outcomes[world_size] = ranks.run(
                script_engines.run_all,
                self.checks[world_size],
                folder,
                world_size=world_size,
                timeout_s=280.0,
            )
        of_check = [of_rank[index] for of_rank in self._outcomes[world_size]]
        for rank, (error, _) in enumerate(of_check):
            assert error is None, f"rank {rank}: {error}"
        assert len({repr(value) for _, value in of_check}) == 1, "ranks end differently"
