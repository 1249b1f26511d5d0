"""Progress of configurations while they run: on a terminal a bar with the remaining time, otherwise a line per row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from zerobench.bench.launch.ranks import ProgressCallback
from zerobench.bench.protocol.job import Progress as RankProgress
from zerobench.results.schema import Row

# Share of a configuration's time that has passed when a phase begins, roughly.
_PHASE_SHARES = {
    "start": 0.0,
    "load": 0.05,
    "verification": 0.25,
    "warm-up": 0.5,
    "measurement": 0.6,
    "validation": 0.9,
    "profile": 0.95,
}


class ProgressDisplay:
    """Counts configurations; within one, phases move the bar."""

    def __init__(self, console: Console, num_tasks: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=num_tasks)
        self._total, self._done = num_tasks, 0

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextmanager
    def task(self, name: str) -> Iterator[ProgressCallback]:
        """One configuration while it runs."""
        self._bar.update(self._task, description=name)

        def on_progress(rank: int, progress: RankProgress) -> None:
            if rank == 0:
                share = _PHASE_SHARES.get(progress.phase, 0.0)
                self._bar.update(
                    self._task, description=f"{name}: {progress.phase}", completed=int(self._done) + share
                )

        yield on_progress
        self.skip()

    def add(self, num_tasks: int) -> None:
        """Count more runs than were known at the beginning."""
        self._total += num_tasks
        self._bar.update(self._task, total=self._total)

    def skip(self) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)

    def note(self, row: Row) -> None:
        """One line for a finished row, for logs and pipes; on a terminal above the bar."""
        text = f"{row.name}: {row.status}"
        if row.step_time_ms is not None:
            text += f", {row.step_time_ms.median:.2f} ms a step"
        if row.turns is not None:
            text += f" {'in turn' if row.turns.how == 'in turn' else 'in passes'}"
        if row.error:
            text += f": {row.error}"
        self._console.print(text, soft_wrap=True, highlight=False)
