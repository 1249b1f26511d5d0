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
    for index, found in enumerate(merged):
        if index:
            plain_console().print()
        show_results(found.results, plain_console())
    folder = plots
    if folder is None and len(results) == 1:
        folder = (results[0] if results[0].is_dir() else results[0].parent) / "plots"
    if folder is None:
        return
    for number, found in enumerate(merged, 1):
        draw_plots(found.results, folder if len(merged) == 1 else folder / str(number))


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


def chart(
    results: ResultPaths,
    metric: Annotated[
        str,
        typer.Option(
            help="A numeric column of results.csv, such as tokens_per_s, step_time_ms.median, mfu.pct or "
            "peak_device_bytes. Or loss: the loss curves of all rows of a workload."
        ),
    ] = "tokens_per_s",
    x: Annotated[
        str | None,
        typer.Option(
            "--x",
            help="The horizontal axis: batch, seq, accum, world_size, model, layers, offload or network. "
            "Default: batch.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="What lines tell apart: strategy, precision, compile or one that --x takes. Default: strategy."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Draw into this folder. Default: charts beside the first results.json."),
    ] = None,
) -> None:
    """Draw a column of the results over a setting, a chart for each combination of the other settings."""
    from zerobench.report.charts import write_charts
    from zerobench.report.losses import write_loss_charts
    from zerobench.results.merging import read_merged

    if metric == "loss" and (x is not None or by is not None):
        raise ConfigError(
            f"--{'x' if x is not None else 'by'} has no effect with --metric loss, which is drawn over steps with a "
            "line for each row. Remove the option."
        )
    merged = read_merged(results)
    first = results[0] if results[0].is_dir() else results[0].parent
    folder = output or first / "charts"
    console = plain_console()
    try:
        if metric == "loss":
            paths, sentences = write_loss_charts(merged, folder)
        else:
            paths = write_charts(merged, folder, metric=metric, x=x or "batch", by=by or "strategy")
            sentences = []
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot receive charts ({error.strerror or error}): give a folder to write to as --output"
        ) from None
    differences = [found.difference for found in merged[1:]]
    for line in (*differences, *sentences, *map(str, paths)):
        console.print(line, soft_wrap=True, highlight=False)
