"""The line between the command and a job that takes turns, which another thread runs. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from threading import Condition

from zerobench.bench.protocol.job import Turn


class Seat:
    """Place of one job among jobs that take turns. The command gives orders and waits for answers; the thread that runs
    the job opens the seat, passes answers on and closes it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._pipes: Mapping[int, int] = {}  # by rank; they take orders
        self._answers: dict[int, Turn] = {}
        self._is_over = False
        self._ordered_s = time.monotonic()

    def open(self, pipes: Mapping[int, int]) -> None:
        with self._changed:
            self._pipes = pipes

    def answer(self, rank: int, turn: Turn) -> None:
        with self._changed:
            self._answers[rank] = turn
            self._changed.notify()

    def close(self) -> None:
        """Give no more orders: the job is over."""
        with self._changed:
            self._pipes, self._is_over = {}, True
            self._changed.notify()

    @property
    def is_waiting(self) -> bool:
        """True if all ranks wait for an order."""
        return 0 < len(self._pipes) == len(self._answers)

    @property
    def ordered_s(self) -> float:
        """Return when the last order was given, on time.monotonic()."""
        return self._ordered_s

    def order(self, order: bytes) -> None:
        with self._changed:
            self._answers, self._ordered_s = {}, time.monotonic()
            for pipe in self._pipes.values():
                with contextlib.suppress(OSError):  # the rank has ended, which its launcher notices
                    os.write(pipe, order)

    def answers(self) -> list[Turn] | None:
        """Wait until all ranks have answered and return their answers, or None where the job is over before."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self.is_waiting)
            return None if self._is_over else list(self._answers.values())
