"""Rows that take turns: how long windows are, their order, and that the interval of a ratio holds what it says."""

from __future__ import annotations

import math
import random

import pytest

from zerobench.bench.turns import take_turns, window_steps
from zerobench.results.stats import median_of_ratios


@pytest.mark.parametrize(
    ("step_ms", "steps"),
    [(1.0, 300), (29.9, 11), (30.0, 10), (100.0, 10), (300.0, 10), (500.0, 6), (2000.0, 1), (60_000.0, 1)],
)
def test_a_window_has_ten_steps_and_lasts_a_part_of_a_second_to_a_few(step_ms, steps) -> None:
    assert window_steps(step_ms) == steps


class Machine:
    """One whose speed drifts: within seconds back and forth, over minutes as a random walk, now and then at once."""

    WINDOW_S, SECONDS, SPREAD, WALK, JUMPS_PER_S, JUMP = 0.4, 3.0, 0.08, 0.002, 1 / 60, 0.15

    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        self._fast, self._slow = generator.gauss(0, self.SPREAD), 0.0
        self._kept = math.exp(-self.WINDOW_S / self.SECONDS)

    def slowness(self) -> float:
        """Return the factor of every row's times in the next window."""
        gauss = self.random.gauss
        self._fast = self._kept * self._fast + gauss(0, self.SPREAD * math.sqrt(1 - self._kept**2))
        self._slow += gauss(0, self.WALK)
        if self.random.random() < self.JUMPS_PER_S * self.WINDOW_S:
            self._slow += gauss(0, self.JUMP)
        return math.exp(self._fast + self._slow)


class Simulated:
    """A row on such a machine, with noise of its own."""

    def __init__(self, name: str, machine: Machine, *, step_ms: float, noise: float) -> None:
        self.name, self._machine, self._step_ms, self._noise = name, machine, step_ms, noise
        self.windows_ms: list[float] = []

    def train(self) -> bool:
        noise = math.exp(self._machine.random.gauss(0, self._noise))
        self.windows_ms.append(self._step_ms * self._machine.slowness() * noise)
        return True


def test_an_interval_of_fifteen_rounds_covers_the_ratio_as_often_as_it_says() -> None:
    generator = random.Random(42)
    trials, covered = 2000, 0
    for _ in range(trials):
        machine = Machine(generator)
        times_ms = (10.0, 10.5, 12.0)
        rows = [Simulated(f"{ms}", machine, step_ms=ms, noise=0.01) for ms in times_ms]
        take_turns(rows, 15)  # type: ignore[arg-type]
        found = median_of_ratios(rows[1].windows_ms, rows[0].windows_ms)
        assert found.low is not None and found.high is not None
        covered += found.low <= 1.05 <= found.high
    assert 0.93 <= covered / trials <= 0.97


class Noting(Simulated):
    """Writes down whose turn it is; ends in its turn number ``ends_at``."""

    def __init__(self, name: str, order: list[str], *, ends_at: int | None = None) -> None:
        super().__init__(name, Machine(random.Random(0)), step_ms=1.0, noise=0.0)
        self._order, self._ends_at, self._turn_num = order, ends_at, 0

    def train(self) -> bool:
        self._order.append(self.name)
        self._turn_num += 1
        return self._turn_num != self._ends_at


def test_another_row_is_first_in_each_round_and_each_follows_every_other() -> None:
    order: list[str] = []
    take_turns([Noting(name, order) for name in "abc"], 6)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab" + "cbaacbbac"


def test_a_row_that_ended_has_no_further_turn_and_the_others_go_on() -> None:
    order: list[str] = []
    rows = [Noting("a", order), Noting("b", order, ends_at=2), Noting("c", order)]
    take_turns(rows, 4)  # type: ignore[arg-type]
    assert "".join(order) == "abcbca" + "ca" + "ca"


def test_rounds_are_told() -> None:
    told: list[int] = []
    take_turns([Noting("a", []), Noting("b", [])], 3, on_round=told.append)  # type: ignore[list-item]
    assert told == [1, 2, 3]
