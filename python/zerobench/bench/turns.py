"""Rows that stay alive and take turns, so that a drift of the machine reaches all of them alike. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.launch.seat import Seat
from zerobench.bench.launch.sibling import SiblingLauncher
from zerobench.bench.protocol.job import Job
from zerobench.bench.protocol.messages import END, TRAIN
from zerobench.errors import Error

WINDOW_STEPS = 10
SHORTEST_WINDOW_S = 0.3
LONGEST_WINDOW_S = 3.0  # beyond it fewer steps do: a drift of seconds must not fit into a window
_ABORT_S = 10.0


def window_steps(step_ms: float) -> int:
    """Return the steps of a row's windows, given its median step time: ten, more where they last less than 0.3 s, fewer
    where they last more than 3 s."""
    at_least = math.ceil(1e3 * SHORTEST_WINDOW_S / step_ms)
    at_most = max(1, math.floor(1e3 * LONGEST_WINDOW_S / step_ms))
    return max(at_least, min(WINDOW_STEPS, at_most))


class Contender:
    """A row whose processes stay alive while others have their turns. A thread waits for its job."""

    def __init__(self, job: Job, launcher: SiblingLauncher, *, log: Path) -> None:
        self.name = job.name
        self.windows_ms: list[float] = []
        self._launcher = launcher
        self._seat = Seat()
        self._outcome: Outcome | None = None
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(job, log), daemon=True)

    def start(self) -> bool:
        """Build and warm up; return whether the row is ready to take turns."""
        self._thread.start()
        return self._seat.answers() is not None

    def train(self) -> bool:
        """Train one window while the others wait; return whether the row can go on."""
        self._seat.order(TRAIN)
        turns = self._seat.answers()
        if turns is None:
            return False
        # The slowest rank's: together they began, and the row's window ends with the last one.
        self.windows_ms.append(max(turn.step_ms or 0.0 for turn in turns))
        return True

    def end(self) -> Outcome:
        """End the row and return what became of it."""
        self._seat.order(END)
        self._thread.join()
        self._launcher.close()
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise Error("a row in turn ended without an outcome: this is a bug of zerobench")
        return self._outcome

    def abort(self) -> None:
        """Kill the row's processes."""
        self._launcher.abort()
        if self._thread.ident is not None:
            self._thread.join(timeout=_ABORT_S)
            if self._thread.is_alive():
                self._launcher.kill()
                self._thread.join(timeout=_ABORT_S)
        self._launcher.close()

    def _run(self, job: Job, log: Path) -> None:
        try:
            self._outcome = self._launcher.run(job, log=log, seat=self._seat)
        except Exception as error:
            self._error = error
        finally:
            self._seat.close()


def take_turns(
    contenders: Sequence[Contender], rounds: int, *, on_round: Callable[[int], None] = lambda _: None
) -> None:
    """Have every row train a window in each round, another one first each time. Once each has been first the order
    turns round, so that no row always follows the same one. A row that ends drops out."""
    gone: set[str] = set()
    for index in range(rounds):
        on_round(index + 1)
        times_round, first = divmod(index, len(contenders))
        order = (*contenders[first:], *contenders[:first])
        for contender in reversed(order) if times_round % 2 else order:
            if contender.name not in gone and not contender.train():
                gone.add(contender.name)
