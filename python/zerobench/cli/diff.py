"""`zerobench diff`: two result files, row by row. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerobench.cli.exit_codes import ExitCode
from zerobench.cli.options import AsJson

if TYPE_CHECKING:
    from zerobench.diff.differences import Diff


class Format(str, Enum):
    """How a diff is written."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def diff(
    old: Annotated[Path, typer.Argument(help="The baseline: a results.json or the folder that holds one.")],
    new: Annotated[Path, typer.Argument(help="The results to judge.")],
    fail_above: Annotated[
        str,
        typer.Option(help="Smallest change for the worse that is a regression, as a share of the old value."),
    ] = "5%",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A numeric column of results.csv, such as tokens_per_s; may be repeated. Default: "
            "step_time_ms.median and peak_device_bytes."
        ),
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="markdown is for the comment of a pull request.")
    ] = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Compare two results: each row is slower, faster, the same within noise, or cannot be told.

    The exit code is 0 if nothing is worse, 3 if a row broke or is worse by more than --fail-above, 2 if a file or an
    option cannot be used, and 1 after any other error."""
    from zerobench.diff import show
    from zerobench.diff.differences import Source
    from zerobench.diff.differences import diff as find_differences
    from zerobench.results.files import read_results
    from zerobench.results.setting_values import percentage

    margin = percentage("--fail-above", fail_above, example="a share between 0 and 1, such as 5% or 0.05")
    sources = [Source(str(path), read_results(path)) for path in (old, new)]
    found = find_differences(sources[0], sources[1], columns=metric or (), margin=margin)
    written: dict[Format, Callable[[Diff], str]] = {
        Format.TABLE: show.table_text,
        Format.MARKDOWN: show.markdown_text,
        Format.JSON: show.json_text,
    }
    typer.echo(written[Format.JSON if as_json else output_format](found), nl=False)
    raise typer.Exit(ExitCode.REGRESSION if found.is_regression() else ExitCode.OK)
