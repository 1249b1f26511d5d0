"""The part of a comparison after each row was measured alone: rows take turns, or are measured in passes. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from zerobench.bench.assess import clear_figures
from zerobench.bench.execution import Execution
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.output import OutputFolder
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.protocol.job import Progress
from zerobench.bench.schedule import Step
from zerobench.bench.turns import Contender, take_turns, window_steps
from zerobench.results.rows import by_workload, ratio_in_turn, step_rate
from zerobench.results.schema import Row, Turns
from zerobench.results.stats import FEWEST_SAMPLES
from zerobench.strategies.catalogue import FLOOR

FEWEST_PASSES = 3
MOST_RUNS = 20  # of --repeats auto


@dataclass(kw_only=True, eq=False)
class Member:
    """A row with the windows of its runs."""

    step: Step
    row: Row
    steps_per_window: int
    runs_ms: list[list[float]] = field(default_factory=list)

    def fail(self, where: str, outcome: Outcome) -> None:
        """Take the row's figures away: its processes did not end well."""
        status = "failed" if outcome.status == "skipped" else outcome.status
        self.row.status, self.row.error = status, f"{where}: {outcome.error}"
        self.row.oom_tier = outcome.oom_tier
        clear_figures(self.row)


@dataclass(kw_only=True, eq=False)
class Group:
    """Rows of one workload: those that take turns with each other, and those that are measured in passes."""

    name: str
    seated: list[Member]
    in_passes: list[Member]

    def move_to_passes(self, members: Sequence[Member]) -> None:
        """Measure ``members`` in passes; all of the group, where fewer than two would be left to take turns."""
        gone = [member for member in self.seated if member in members]
        self.seated = [member for member in self.seated if member not in gone]
        if len(self.seated) < 2:
            gone, self.seated = [*gone, *self.seated], []
        for member in gone:
            member.runs_ms = []
        self.in_passes += gone


def are_told_apart(rows: Sequence[Row], precision: float) -> bool:
    """Return whether the ratio of the two fastest rows has an interval whose larger half is at most ``precision`` of
    it; also where there are not two rows."""
    rates = sorted(((step_rate(row) or 0.0, row.name, row) for row in rows if row.turns), reverse=True)
    if len(rates) < 2:
        return True
    ratio = ratio_in_turn(rates[1][2], rates[0][2])
    if ratio is None or ratio.low is None or ratio.high is None:
        return False
    return max(ratio.high / ratio.value, ratio.value / ratio.low) - 1 <= precision


class TurnRuns:
    """Measures rows again, together. ``save`` is called whenever rows have changed, and ``before`` before each run of
    processes: what it raises ends the measurements, and rows keep what they have. ``name``: how names of groups end."""

    def __init__(
        self,
        execution: Execution,
        *,
        output: OutputFolder,
        display: ProgressDisplay,
        save: Callable[[], None],
        before: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> None:
        self._execution = execution
        self._options = execution.options
        self._output = output
        self._display = display
        self._save = save
        self._before = before
        self._name = name

    def measure(self, steps: Sequence[Step], rows: Sequence[Row]) -> None:
        """Measure ``rows``, each of the step in its place. Rows that have no other to be compared with stay as they
        are."""
        members = {
            id(row): Member(step=step, row=row, steps_per_window=window_steps(row.step_time_ms.median))
            for step, row in zip(steps, rows, strict=True)
            if row.step_time_ms is not None
        }
        for number, found in zip(count(1), by_workload([row for row in rows if id(row) in members])):
            if len(found) > 1:
                self._measure_group(
                    self._group(f"workload {number}{self._name}", [members[id(row)] for row in found])
                )

    def _group(self, name: str, members: Sequence[Member]) -> Group:
        seats = {id(row) for row in self._execution.seats([member.row for member in members])}
        group = Group(name=name, seated=list(members), in_passes=[])
        group.move_to_passes([member for member in members if id(member.row) not in seats])
        return group

    def _measure_group(self, group: Group) -> None:
        run = 0
        while len(group.seated) > 1 and not self._is_enough(group, run):
            run += 1
            self._before()
            self._display.add(1)
            with self._display.task(f"{len(group.seated)} rows in turn") as on_progress:
                self._run_in_turn(group, run, lambda what: on_progress(0, Progress(phase=what, step=0)))
            self._record(group.seated, "in turn", group)
        asked = self._options.repeats
        passes = max(FEWEST_PASSES, FEWEST_SAMPLES if asked == "auto" else asked)
        self._display.add(passes * len(group.in_passes))
        try:
            for number in range(1, passes + 1):
                for member in group.in_passes:
                    self._before()
                    self._measure_pass(member, number)
        finally:
            if group.in_passes:
                self._record(group.in_passes, "passes", group)

    def _is_enough(self, group: Group, runs: int) -> bool:
        """Return whether the rows in turn need no further run."""
        asked = self._options.repeats
        if asked != "auto":
            return runs >= asked
        rows = [member.row for member in group.seated if member.row.strategy != FLOOR]
        return runs >= MOST_RUNS or (runs > 0 and are_told_apart(rows, self._options.ratio_precision))

    def _run_in_turn(self, group: Group, run: int, tell: Callable[[str], None]) -> None:
        """Have the seated rows take turns in fresh processes."""
        ready: list[tuple[Member, Contender]] = []
        contenders: list[Contender] = []
        try:
            for member in list(group.seated):
                tell(f"starting {member.row.name}")
                contender = self._contender(member)
                contenders.append(contender)
                if contender.start():
                    ready.append((member, contender))
                else:
                    self._take_out(group, member, contender.end(), f"in turn, run {run}")
            if len(ready) > 1:
                rounds = self._options.rounds
                take_turns(
                    [contender for _, contender in ready],
                    rounds,
                    on_round=lambda number: tell(f"round {number} of {rounds}"),
                )
            for member, contender in ready:
                outcome = contender.end()
                if outcome.status != "ok":
                    self._take_out(group, member, outcome, f"in turn, run {run}")
                elif contender.windows_ms and member in group.seated:
                    member.runs_ms.append(contender.windows_ms)
        except BaseException:
            for contender in contenders:
                contender.abort()
            raise

    def _contender(self, member: Member) -> Contender:
        step, row = member.step, member.row
        return self._execution.contender(
            step, row, steps_per_window=member.steps_per_window, log=self._output.log(row.name)
        )

    def _take_out(self, group: Group, member: Member, outcome: Outcome, where: str) -> None:
        """Measure in passes what the others left no memory for; anything else is the row's own failure."""
        if outcome.status == "oom":
            group.move_to_passes([member])
            return
        member.fail(where, outcome)
        group.seated = [other for other in group.seated if other is not member]
        self._display.note(member.row)

    def _measure_pass(self, member: Member, number: int) -> None:
        row = member.row
        if row.status != "ok":
            self._display.skip()
            return
        with self._display.task(f"{row.name} (pass {number})") as on_progress:
            outcome, window_ms = self._execution.measure_window(
                member.step,
                row,
                steps_per_window=member.steps_per_window,
                log=self._output.log(row.name),
                on_progress=on_progress,
            )
        if window_ms is None:
            member.fail(f"pass {number}", outcome)
            self._display.note(row)
        else:
            member.runs_ms.append([window_ms])

    def _record(self, members: Sequence[Member], how: str, group: Group) -> None:
        for member in members:
            if member.row.status == "ok" and member.runs_ms:
                turns = Turns(
                    how="in turn" if how == "in turn" else "passes",
                    group=group.name,
                    steps_per_window=member.steps_per_window,
                    windows_ms=member.runs_ms,
                )
                self._execution.apply(member.row, turns)
                self._display.note(member.row)
        self._save()
