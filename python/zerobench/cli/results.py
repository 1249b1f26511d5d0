"""The commands that read result files: `show` and `chart`. Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console

if TYPE_CHECKING:
    from zerobench.results.schema import Results

ResultPaths = Annotated[
    list[Path],
    typer.Argument(
        help="A results.json or the folder that holds one. Of several, rows with equal settings are merged as repeats; "
        "results of other machines or versions stay apart."
    ),
]


def show(
    results: ResultPaths,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Draw the plots into this folder. Default: plots beside results.json; for several results none."
        ),
    ] = None,
) -> None:
    """The table, the advice and the plots again, from files alone."""
    from zerobench.bench.show import show as show_results
    from zerobench.results.merging import read_merged

    merged = read_merged(results)
    for index, (found, _) in enumerate(merged):
        if index:
            plain_console().print()
        show_results(found, plain_console())
    folder = plots
    if folder is None and len(results) == 1:
        folder = (results[0] if results[0].is_dir() else results[0].parent) / "plots"
    if folder is None:
        return
    for number, (found, _) in enumerate(merged, 1):
        draw_plots(found, folder if len(merged) == 1 else folder / str(number))


def draw_plots(found: Results, folder: Path) -> None:
    """Draw the plots of results into a folder and print their paths."""
    from zerobench.report import write_plots

    try:
        paths = write_plots(found, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot receive plots ({error.strerror or error}): give a folder to write to as --plots"
        ) from None
    for path in paths:
        plain_console().print(str(path), soft_wrap=True, highlight=False)
