"""The results of a comparison while it runs: rows are appended, judged, saved and shown. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from rich.console import Console

from zerobench.bench.assess import settle
from zerobench.bench.closing import closing
from zerobench.bench.execution import Execution
from zerobench.bench.launch.environments import device_environment
from zerobench.bench.output import OutputFolder
from zerobench.bench.plan.configuration import Plan
from zerobench.bench.plan.find import value_in
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.resume import is_measured
from zerobench.bench.sampler import Sampler, shared_warning
from zerobench.bench.schedule import Step
from zerobench.bench.search import RowSearch, step_at
from zerobench.bench.show import show_written
from zerobench.bench.surroundings import Surroundings
from zerobench.bench.turn_runs import TurnRuns
from zerobench.host import interrupts
from zerobench.report import finish_rows
from zerobench.results.rows import repeats_text
from zerobench.results.schema import Results, Row, Try

_SAMPLER_START_S = 10.0


def judge(results: Results, baseline: str | None) -> None:
    """Judge rows against each other and fill in what relates them to the baseline."""
    settle(results)
    finish_rows(results, baseline)


class OutOfTime(Exception):
    """Nothing new begins: the time of --max-minutes is over."""


class Session:
    """The rows so far, as their own runs left them, and the results, which hold judged copies."""

    def __init__(
        self,
        plan: Plan,
        *,
        host: Surroundings,
        output: OutputFolder,
        judge: Callable[[Results, str | None], None] = judge,
    ) -> None:
        self._plan = plan
        self._host = host
        self._output = output
        self._judge = judge
        self._began_s = time.monotonic()
        self._rows: list[Row] = []
        self._steps: list[Step] = []  # of the rows: with --find at the value that was found
        self._earlier: dict[int, Row] = {}  # by index of the configuration
        self._searching: Row | None = None
        self._stopped_after_minutes: float | None = None
        details = {**host.machine["details"], "rank_environment": device_environment(plan.options.device)}
        self.results = Results(
            created=now_text(),
            machine={**host.machine, "details": details},
            versions=host.versions,
            command=host.command,
            warnings=[*plan.warnings],
        )

    def warn_of_sharing(self, sampler: Sampler) -> None:
        """Add a warning where GPUs are in use while nothing of the comparison runs yet."""
        deadline_s = time.monotonic() + _SAMPLER_START_S
        while self._plan.options.gpus and time.monotonic() < deadline_s:
            sample = sampler.first()
            if sample is not None:
                warning = shared_warning(sample)
                self.results.warnings += [warning] if warning else []
                return
            time.sleep(0.05)

    def go_on_from(self, earlier: Results, rows: Mapping[int, Row]) -> None:
        """Keep the rows of an earlier comparison, by the index of their configuration, in place of running them."""
        self._earlier = dict(rows)
        self._searching = earlier.searching
        self.results.created = earlier.created
        self.results.warnings = list(dict.fromkeys([*earlier.warnings, *self.results.warnings]))

    def run(self, steps: Sequence[Step], execution: Execution, display: ProgressDisplay) -> None:
        """Take the steps in order; save after each. Rows that can be compared with others then take turns, and are
        not repeated alone. Begin nothing after ``--max-minutes``."""
        try:
            self._run(steps, execution, display)
            self.results.complete = True
        except OutOfTime:
            self._stopped_after_minutes = self._plan.options.max_minutes
        self.write()

    def _run(self, steps: Sequence[Step], execution: Execution, display: ProgressDisplay) -> None:
        firsts = [step for step in steps if step.repeat == 0]
        for asked in firsts:
            step, row = self._first(asked, execution, display)
            self._steps.append(step)
            self._rows.append(row)
            if self._searching is not None and self._searching.name == row.name:
                self._searching = None
            if step.ends_group:
                execution.drop_reference(step.group)
            self._save()
        if self._plan.options.rounds:
            self._take_turns(self._steps, execution, display)
        for step in steps[len(firsts) :]:
            self._repeat(step, execution, display)
            self._save()

    def _expect_time(self) -> None:
        limit = self._plan.options.max_minutes
        if limit is not None and time.monotonic() - self._began_s > 60 * limit:
            raise OutOfTime

    def write(self) -> None:
        """Write the rows as their own runs left them, then results.json: what that shows can be resumed."""
        measured = {"rows": self._rows, "searching": self._searching}
        self._output.write_measured(self.results.model_copy(update=measured))
        self._output.write_results(self.results)

    def end(self, *, interrupted: bool, console: Console, notes: Console) -> int:
        """Write tables and plots, show them, and return the exit code. ``notes`` takes what is no result."""
        try:
            with interrupts.deferred():
                self._close()
                self.write()  # Ctrl-C came perhaps before the last rows were written
                self._output.write_summary(self.results)
                self._output.write_plots(self.results)
        except KeyboardInterrupt:
            interrupts.ignore_further()
            interrupted = True
        finally:
            show_written(self.results, self._output.path, console)
        minutes = self._stopped_after_minutes
        if not interrupted and minutes is None:
            return exit_code(self.results.rows)
        why = "interrupted" if interrupted else f"stopped after {minutes:g} minutes"
        notes.print(
            f"{why}: {kept_text(self.results.rows, len(self._plan.configurations))}; "
            f"see them again with `zerobench show {self._output.path}`, and go on with the same options and "
            f"`--resume {self._output.path}`",
            style="yellow",
            soft_wrap=True,
        )
        return interrupts.exit_code() if interrupted else exit_code(self.results.rows)

    def _close(self) -> None:
        """Fill in the sentences that the summary ends with. Rows that are missing may fit, so nothing is estimated."""
        options = self._plan.options
        if self.results.complete or options.find is not None:
            configurations = [step.configuration for step in self._steps]
            self.results.closing = closing(
                configurations, self.results.rows, options=options, host=self._host
            )

    def _first(self, step: Step, execution: Execution, display: ProgressDisplay) -> tuple[Step, Row]:
        """Return the row of a configuration and the step that it ran as."""
        find = self._plan.options.find
        if step.index in self._earlier:
            display.skip()
            row = self._earlier[step.index]
            return step if row.search is None else step_at(step, find, value_in(find, row.settings)), row
        if find is None or step.configuration.refused:
            return step, self._measure(step, execution, display)
        return self._search(step, find, execution, display)

    def _search(
        self, step: Step, find: str, execution: Execution, display: ProgressDisplay
    ) -> tuple[Step, Row]:
        """Find the largest value at which the row fits, and measure it there."""
        name = step.configuration.name
        log = self._output.log(f"{name}.tries")
        kept = self._searching if self._searching and self._searching.name == name else None

        def attempt(tried: Step, value: int) -> Try:
            self._expect_time()
            display.add(1)
            return execution.attempt(tried, value=value, log=log, track=display.task)

        def measure(tried: Step) -> Row:
            row = self._measure(tried, execution, display)
            execution.drop_reference(tried.group)
            return row

        def keep(row: Row) -> None:
            self._searching = row
            self.write()

        search = RowSearch(
            step,
            find,
            kept.search.tries if kept and kept.search else (),
            attempt=attempt,
            measure=measure,
            keep=keep,
        )
        found, row = search.run()
        if row.rerun is None:  # no value fits
            row.rerun = rerun_command(found.configuration, self._plan.options)
            display.note(row)
        return found, row

    def _measure(self, step: Step, execution: Execution, display: ProgressDisplay) -> Row:
        """Verify and measure a row."""
        self._expect_time()
        name = step.configuration.name
        rerun = rerun_command(step.configuration, self._plan.options)
        log = self._output.start_log(name, rerun=rerun)
        started, start_s = now_text(), time.monotonic()
        row, was_started = execution.verify_and_measure(step, log=log, track=display.task)
        if not was_started:
            display.skip()
        row.started, row.duration_s = started, round(time.monotonic() - start_s, 3)
        row.log, row.rerun = str(log.relative_to(self._output.path)), rerun
        display.note(row)
        return row

    def _take_turns(self, steps: Sequence[Step], execution: Execution, display: ProgressDisplay) -> None:
        """Measure the rows that are ok together, without those whose turns are of an earlier comparison."""
        ok = [
            step
            for step in steps
            if self.results.rows[step.index].status == "ok" and self._rows[step.index].turns is None
        ]
        runs = TurnRuns(
            execution,
            output=self._output,
            display=display,
            save=self._save,
            before=self._expect_time,
            name=f", resumed {now_text()}" if self._earlier else "",
        )
        runs.measure(ok, [self._rows[step.index] for step in ok])

    def _repeat(self, step: Step, execution: Execution, display: ProgressDisplay) -> None:
        row = self._rows[step.index]
        is_done = step.index in self._earlier and is_measured(row, repeat=step.repeat)
        if self.results.rows[step.index].status != "ok" or row.turns is not None or is_done:
            display.skip()
            return
        self._expect_time()
        again = replace(self._steps[step.index], repeat=step.repeat)
        execution.measure_again(again, row, log=self._output.log(row.name), track=display.task)

    def _save(self) -> None:
        """Judge copies of the rows before anybody sees them: Ctrl-C may come at any moment, and then the results are
        shown as they are."""
        judged = self.results.model_copy(update={"rows": [row.model_copy(deep=True) for row in self._rows]})
        self._judge(judged, self._plan.options.baseline)
        self.results.rows = judged.rows
        self.write()


def kept_text(rows: Sequence[Row], total: int) -> str:
    if not rows or rows[0].settings.repeats in (1, "auto"):
        return f"{len(rows)} of {total} rows are complete and kept"
    return f"{len(rows)} of {total} rows are kept, with {repeats_text(rows)} repeats of those that are ok"


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 when what could run is right, 1 when a row is wrong or failed or nothing could run."""
    statuses = {row.status for row in rows}
    return 1 if statuses & {"wrong", "failed"} or "ok" not in statuses else 0


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
