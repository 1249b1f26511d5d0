"""Output at the end of a comparison, which `zerobench show` prints again. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from zerobench.host.consoles import drop_stdout
from zerobench.report import advise, render_table
from zerobench.results.files import OutputError
from zerobench.results.schema import Results


def show(results: Results, console: Console) -> None:
    """Print the table and the advice."""
    console.print(render_table(results), crop=False)
    if not results.rows:
        return
    for sentence in advise(results):
        console.print(sentence, soft_wrap=True, highlight=False)


def verdict(results: Results) -> str:
    """Return the first sentence of the advice: the one line to read."""
    return advise(results)[0] if results.rows else "No rows."


def results_content(results: Results) -> dict[str, Any]:
    """Return the advice and all that the result file holds, ready for JSON."""
    return {
        "advice": advise(results) if results.rows else [],
        **results.model_dump(mode="json"),
    }


def show_written(results: Results, folder: Path, console: Console) -> None:
    """Print results and the folder that holds them. Raise OutputError where standard output takes nothing."""
    try:
        show(results, console)
        console.print(f"\nresults in {folder}", soft_wrap=True, highlight=False)
    except OSError as error:
        drop_stdout()
        raise OutputError(
            f"the table cannot be written to standard output ({error.strerror}): it is in {folder / 'summary.txt'}"
        ) from None
