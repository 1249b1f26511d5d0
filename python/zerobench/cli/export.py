"""`zerobench export`: where the text goes."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from zerobench.errors import ConfigError
from zerobench.export.chosen import chosen_row
from zerobench.export.into import change_file
from zerobench.export.targets import exported
from zerobench.host.consoles import plain_console, print_document
from zerobench.results.files import write_atomically


def run_export(place: str, *, to: str, output: Path | None, into: Path | None, as_json: bool) -> None:
    """Print the document, write it as ``output``, or set its keys in the file ``into``; notes go to standard error.
    ``as_json``: print one JSON document, which has the notes, instead."""
    if into is not None and (to != "deepspeed" or output is not None):
        raise ConfigError("--into changes a DeepSpeed file: give it with --to deepspeed and without --output")
    if output is not None and output.exists():
        raise ConfigError(f"{output} exists: remove it, or give another --output")
    results, row = chosen_row(place)
    document = exported(results, row, to)
    change: list[str] = []
    if into is not None:
        change = change_file(into, json.loads(document.text))
    elif output is not None:
        write(output, document.text)
    if as_json:
        content = {
            "row": row.name,
            "to": to,
            "text": document.text,
            "notes": document.notes,
            "file": into or output,
            "change": change,
        }
        print_document(f"row {row.name} for {to}", content)
        return
    for note in (f"row {row.name}", *document.notes):
        plain_console(stderr=True).print(f"note: {note}", soft_wrap=True, highlight=False)
    if into is not None:
        text = "\n".join(change) if change else f"{into} has these values already"
        plain_console().print(text, soft_wrap=True, highlight=False)
    elif output is None:
        typer.echo(document.text, nl=False)


def write(output: Path, text: str) -> None:
    """Write a new file. Raise ConfigError if it cannot be written."""
    try:
        write_atomically(output, text.encode())
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror}): give another --output") from None
