"""`zerobench report`: result files as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerobench.cli.options import AsJson
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console, print_document


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="One or more results.json files, or the folders that hold them.", metavar="RESULTS..."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Write this .html file. Default: report.html next to the first results.json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: verdict, advice, table, charts and every setting.

    The page opens without a network. An older page is replaced."""
    from zerobench.page.write import page_text
    from zerobench.results.files import read_results, write_atomically

    folder = results[0] if results[0].is_dir() else results[0].parent
    target = output or folder / "report.html"
    if target.suffix not in {".html", ".htm"}:
        raise ConfigError(f"--output {target} must end in .html: give another name")
    found = [(_title(path), read_results(path)) for path in results]
    text = page_text(found)
    try:
        write_atomically(target, text.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror or error}): give another --output"
        ) from None
    if as_json:
        row_num = sum(len(one.rows) for _, one in found)
        print_document(
            f"a page of {row_num} rows in {target}", {"page": target, "bytes": target.stat().st_size}
        )
        return
    plain_console().print(str(target), soft_wrap=True, highlight=False)


def _title(path: Path) -> str:
    """Return the name of the folder, or of the file if it is not called results.json."""
    folder = path if path.is_dir() else path.parent if path.name == "results.json" else path
    return folder.resolve().name
