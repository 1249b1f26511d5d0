"""``--dry-run``: what a comparison would do and how long it would take, without doing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from zerobench import strategies
from zerobench.bench.execution import why_not_started
from zerobench.bench.jobs import JobMaker
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.plan.configuration import Plan
from zerobench.bench.plan.find import value_in
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.protocol.place import MachinePlace
from zerobench.bench.resume import kept_rows, machine_identity, read_measured
from zerobench.bench.schedule import Step, schedule
from zerobench.bench.surroundings import Surroundings
from zerobench.errors import Error
from zerobench.host.consoles import print_document
from zerobench.results.files import read_results
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import duration_text

# Settings that tell nothing of how long a row takes, or that only a run tells.
_NOT_OF_THE_DURATION = {"repeats", *(key for key, setting in SETTINGS.items() if setting.known_after_run)}


def dry_run(
    plan: Plan,
    *,
    output_dir: Path | None,
    resume: Path | None = None,
    host: Surroundings,
    launcher: Launcher,
    console: Console,
    notes: Console,
) -> int:
    """Print the rows, those that would be skipped and why, and the time that the others take. Return 0. ``resume``: a
    folder whose rows would be kept."""
    launcher.close()  # by which ranks of torchrun and srun that wait for jobs end
    for warning in plan.warnings:
        notes.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    folders = {Path("results"), *(path.parent for path in (output_dir, resume) if path)}
    kept = kept_rows(resume, read_measured(resume), plan) if resume else {}
    runs = 1 if plan.options.repeats == "auto" else plan.options.repeats
    seconds = earlier_seconds(read_earlier(folders), host.machine)
    known: list[float | None] = []
    rows = []
    for step in (step for step in schedule(plan) if step.repeat == 0):
        is_kept = step.configuration.name in kept
        text = "kept" if is_kept else why_not_run(step, options=plan.options, host=host)
        if text is None and (find := plan.options.find):
            known.append(None)
            text = f"searches from {find} {value_in(find, step.configuration.settings)}"
        elif text is None:
            key = _key(step.configuration.strategy, step.configuration.settings.model_dump())
            took = seconds.get(key)
            known.append(None if took is None else took * runs)
            text = "" if known[-1] is None else f"about {duration_text(known[-1])}"
        rows.append((step.configuration.name, text))
    _print(rows, summary(known, row_num=len(plan.configurations)), console, as_json=plan.options.as_json)
    return 0


def _print(rows: Sequence[tuple[str, str]], verdict: str, console: Console, *, as_json: bool) -> None:
    """Print the names of rows, what is said of each, and the verdict."""
    if as_json:
        print_document(verdict, {"rows": [{"name": name, "text": text} for name, text in rows]})
        return
    for name, text in rows:
        console.print(": ".join(filter(None, [name, text])), soft_wrap=True, highlight=False, markup=False)
    console.print(f"\n{verdict}", soft_wrap=True, highlight=False)


def summary(known: Sequence[float | None], *, row_num: int) -> str:
    """Return how many rows would run and how long that takes. ``known``: the seconds of each, None if unknown."""
    rows = f"{row_num} row{'s' if row_num != 1 else ''}, of which {len(known)} would run"
    told = [seconds for seconds in known if seconds is not None]
    if not told:
        return f"{rows}. No earlier results of this machine tell how long that takes."
    if len(told) == len(known):
        return f"{rows}: about {duration_text(sum(told))}, by earlier results."
    return f"{rows}. By earlier results {len(told)} of them take about {duration_text(sum(told))}."


def why_not_run(step: Step, *, options: CompareOptions, host: Surroundings) -> str | None:
    """Return the status that a row would have without running and the reason, or None for a row that would run."""
    configuration = step.configuration
    if configuration.refused:
        return f"skipped: {configuration.refused}"
    if options.find is None and (too_large := why_not_started(configuration, options=options, host=host)):
        return f"oom: {too_large.reason}"
    reason = _unsupported(step, options=options, host=host)
    return f"skipped: {reason}" if reason else None


def _unsupported(step: Step, *, options: CompareOptions, host: Surroundings) -> str | None:
    """Return why the strategy itself would not run the row, which ranks ask it once they are started."""
    from zerobench.bench.rank.worker import Place, strategy_settings  # imports torch

    strategy = strategies.get(step.configuration.strategy)
    ranks = step.configuration.settings.world_size
    place = Place(
        rank=0,
        world_size=ranks,
        local_rank=0,
        local_world_size=ranks,
        rendezvous="dry-run",
        ports=(),
        machine=MachinePlace.of_one_launcher(0, ranks),
    )
    jobs = JobMaker(
        options=options,
        scratch=Path(),
        data_digest=None,
        memory_available_bytes=host.memory_available_bytes,
    )
    asked = strategy_settings(jobs.measurement(step), place)
    return strategy.unplaced(asked) or strategy.unsupported(asked)


def read_earlier(folders: Iterable[Path]) -> list[Results]:
    """Return the results in folders of results, the oldest first."""
    found = []
    for path in {path for folder in folders for path in folder.glob("*/results.json")}:
        try:
            found.append(read_results(path))
        except Error:
            continue  # of a newer version, or not whole
    return sorted(found, key=lambda results: results.created)


def earlier_seconds(earlier: Sequence[Results], machine: dict[str, Any]) -> dict[str, float]:
    """Return how long rows took on this machine, by strategy and settings; the latest counts."""
    return {
        _key_of_row(row): row.duration_s + turn_seconds(row)
        for results in earlier
        if machine_identity(results.machine) == machine_identity(machine)
        for row in results.rows
        if row.duration_s is not None and row.status not in ("oom", "skipped")
    }


def turn_seconds(row: Row) -> float:
    """Return how long the windows of one run of a row took."""
    if row.turns is None:
        return 0.0
    windows_ms = [window for run in row.turns.windows_ms for window in run]
    return row.turns.steps_per_window * sum(windows_ms) / 1e3 / max(len(row.turns.windows_ms), 1)


def _key_of_row(row: Row) -> str:
    return _key(row.strategy, row.settings.model_dump())


def _key(strategy: str, settings: dict[str, Any]) -> str:
    return repr((strategy, sorted((k, v) for k, v in settings.items() if k not in _NOT_OF_THE_DURATION)))
