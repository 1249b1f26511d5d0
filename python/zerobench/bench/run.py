"""The comparison from beginning to end: schedule, execution, session. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from zerobench import data
from zerobench.bench.execution import Execution
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.output import OutputFolder
from zerobench.bench.plan.configuration import Plan
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.resume import earlier_rows, read_measured
from zerobench.bench.sampler import Sampler
from zerobench.bench.schedule import schedule, task_num
from zerobench.bench.session import Session
from zerobench.bench.show import show
from zerobench.bench.surroundings import Surroundings
from zerobench.host import interrupts
from zerobench.results.schema import Results


def run_comparison(
    plan: Plan,
    *,
    output_dir: Path | None,
    resume: Path | None = None,
    host: Surroundings,
    launcher: Launcher,
    console: Console,
    notes: Console,
    conclude: Callable[[Results, Path], None] | None = None,
) -> int:
    """Run every configuration and report; return the exit code. ``notes`` takes progress and warnings. ``resume``: a
    folder of earlier results to go on with. ``conclude`` gets the results and their folder at the end, also after
    Ctrl-C."""
    if resume is not None:
        read_measured(resume)  # raises before anything starts
    output = OutputFolder(resume or output_dir, resumed=resume is not None)
    session, steps = Session(plan, host=host, output=output), schedule(plan)
    gpus = plan.options.gpus
    # On GPUs the samples stay beside the results.
    samples = (output.path if gpus else launcher.scratch) / "samples.jsonl"
    sampler = Sampler(samples, uuids=[gpu.uuid for gpu in gpus])
    interrupted = False
    try:
        with launcher, sampler:
            session.warn_of_sharing(sampler)
            for warning in session.results.warnings:
                notes.print(f"warning: {warning}", style="yellow", soft_wrap=True)
            with ProgressDisplay(notes, task_num(steps)) as display:
                if resume is None:
                    session.write()  # by which a folder of data leaves out the folder of results
                digest = data.digest_of(
                    plan.options.data, text_field=plan.options.text_field, tokens=plan.options.tokens
                )
                session.results.data_digest = digest
                if resume is not None:
                    session.go_on_from(*earlier_rows(resume, plan, host=host, data_digest=digest))
                execution = Execution(
                    plan.options,
                    host=host,
                    launcher=launcher,
                    sampler=sampler,
                    data_digest=digest,
                    traces=output.traces() if plan.options.trace else None,
                )
                session.run(steps, execution, display)
    except KeyboardInterrupt:
        interrupts.ignore_further()
        interrupted = True
    except Exception:  # of a disk that is full, say: what was measured is shown
        show(session.results, console)
        raise
    code = session.end(interrupted=interrupted, console=console, notes=notes)
    if conclude is not None:
        conclude(session.results, output.path)
    return code
