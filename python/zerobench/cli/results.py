"""The commands that read result files: `show` and `chart`. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerobench.cli.options import AsJson
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console, print_document
from zerobench.results.settings import chart_axes

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
            help="Draw the plots into this folder. Default: plots next to results.json; for several results none."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The verdict, the table, the advice and the plots again, from files alone."""
    from zerobench.bench.show import results_content, verdict
    from zerobench.bench.show import show as show_results
    from zerobench.results.merging import read_merged

    console = plain_console()
    merged = read_merged(results)
    if not as_json:
        console.print(verdict(merged[0].results), soft_wrap=True, highlight=False)
        for found in merged:
            console.print()
            show_results(found.results, console)
    paths = draw_plots([found.results for found in merged], plots or plots_folder(results))
    if as_json:
        contents = [{"sources": found.sources, **results_content(found.results)} for found in merged]
        print_document(verdict(merged[0].results), {"results": contents, "plots": paths})
        return
    for path in paths:
        console.print(str(path), soft_wrap=True, highlight=False)


def plots_folder(results: Sequence[Path]) -> Path | None:
    """Return the folder for plots of a single result, next to it; None for several."""
    if len(results) > 1:
        return None
    return (results[0] if results[0].is_dir() else results[0].parent) / "plots"


def draw_plots(found: Sequence[Results], folder: Path | None) -> list[Path]:
    """Draw the plots of each results into a folder, or into numbered ones in it; return the files."""
    from zerobench.report import write_plots

    if folder is None:
        return []
    paths: list[Path] = []
    for number, results in enumerate(found, 1):
        target = folder if len(found) == 1 else folder / str(number)
        try:
            paths += write_plots(results, target)
        except OSError as error:
            raise ConfigError(
                f"{target} cannot receive plots ({error.strerror or error}): give a folder to write to as --plots"
            ) from None
    return paths


def chart(
    results: ResultPaths,
    metric: Annotated[
        str,
        typer.Option(
            help="A numeric column of results.csv, such as tokens_per_s, step_time_ms.median, mfu.pct or "
            "peak_device_bytes. Or loss: the loss curves of all rows of a workload; phases or memory: what the step "
            "time or the memory of each row consists of."
        ),
    ] = "tokens_per_s",
    x: Annotated[
        str | None,
        typer.Option(
            "--x",
            help=f"The horizontal axis: one of {', '.join(chart_axes())}. Default: batch.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="What each line stands for: strategy or one that --x takes. Default: "
            "strategy. With loss, precision gives each strategy a chart with a line for each precision."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Draw into this folder. Default: charts next to the first results.json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a column of the results over a setting, a chart for each combination of the other settings."""
    from zerobench.report.drawing import draw, expect_axes
    from zerobench.results.merging import read_merged

    expect_axes(metric, x, by)
    merged = read_merged(results)
    first = results[0] if results[0].is_dir() else results[0].parent
    folder = output or first / "charts"
    try:
        paths, sentences = draw(merged, folder, metric=metric, x=x, by=by)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot receive charts ({error.strerror or error}): give a folder to write to as --output"
        ) from None
    differences = [found.difference for found in merged[1:]]
    if as_json:
        verdict = f"{len(paths)} files with charts of {metric} in {folder}"
        print_document(verdict, {"sentences": sentences, "differences": differences, "charts": paths})
        return
    console = plain_console()
    for line in (*differences, *sentences, *map(str, paths)):
        console.print(line, soft_wrap=True, highlight=False)
