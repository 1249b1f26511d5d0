"""`zerobench export`: where the text goes."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from zerobench.errors import ConfigError
from zerobench.export.chosen import chosen_row
from zerobench.export.into import change_file
from zerobench.export.targets import exported
from zerobench.host.consoles import plain_console
from zerobench.results.files import write_atomically


def run_export(place: str, *, to: str, output: Path | None, into: Path | None) -> None:
    """Print the document, write it as ``output``, or set its keys in the file ``into``; notes go to standard error."""
    if into is not None and (to != "deepspeed" or output is not None):
        raise ConfigError("--into changes a DeepSpeed file: give it with --to deepspeed and without --output")
    if output is not None and output.exists():
        raise ConfigError(f"{output} exists: remove it, or give another --output")
    results, row = chosen_row(place)
    document = exported(results, row, to)
    notes = plain_console(stderr=True)
    for note in [f"row {row.name}", *document.notes]:
        notes.print(f"note: {note}", soft_wrap=True, highlight=False)
    if into is not None:
        lines = change_file(into, json.loads(document.text))
        text = "\n".join(lines) if lines else f"{into} says this already"
        plain_console().print(text, soft_wrap=True, highlight=False)
    elif output is not None:
        try:
            write_atomically(output, document.text.encode())
        except OSError as error:
            raise ConfigError(
                f"{output} cannot be written ({error.strerror}): give another --output"
            ) from None
    else:
        typer.echo(document.text, nl=False)
