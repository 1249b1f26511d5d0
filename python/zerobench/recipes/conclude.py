"""Write and print the charts and sentences that end a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zerobench.errors import ConfigError
from zerobench.recipes.known import KNOWN
from zerobench.recipes.published import csv_text, pairs_of, table_text
from zerobench.recipes.recipe import Chart, Recipe
from zerobench.report.charts import CHART_SUFFIXES
from zerobench.report.drawing import DEFAULT_X
from zerobench.report.drawing import draw as draw_charts
from zerobench.results.files import cannot_be_written, write_atomically
from zerobench.results.merging import read_merged
from zerobench.results.schema import Results


def conclude(
    recipe: Recipe, results: Results, folder: Path, *, console: Console, references: bool = False
) -> None:
    """Write charts/ and conclusions.txt into the result folder and print the sentences and the paths.

    ``references``: also write the figures of the recipe's studies as references.csv, and print them as a table."""
    lines = sentences(recipe, results)
    path = folder / "conclusions.txt"
    try:
        write_atomically(path, "".join(f"{line}\n" for line in [recipe.question, "", *lines]).encode())
        pairs = pairs_of(results, recipe.studies) if references else []
        if references:
            path = folder / "references.csv"
            write_atomically(path, csv_text(pairs).encode())
        path = folder / "charts"
        drawn = [drawn for chart in recipe.charts for drawn in draw(chart, folder)]
        remove_earlier(recipe.charts, path, kept=drawn)
    except OSError as error:
        raise cannot_be_written(path, error) from None
    if references:
        lines = [
            *lines,
            "\nPublished figures, and ours where a row has the same settings:\n",
            table_text(pairs),
        ]
    for line in (f"\n{recipe.question}", *lines, *map(str, drawn)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def sentences(recipe: Recipe, results: Results) -> list[str]:
    """Return the sentences that the rows support."""
    return [text for name in recipe.conclude for text in KNOWN[name](results)]


def remove_earlier(charts: Sequence[Chart], folder: Path, *, kept: Sequence[Path]) -> None:
    """Remove other files of these charts from ``folder``. A smaller grid left them: --resume adds settings, which files
    are named after."""
    for chart in charts:
        for path in folder.glob(f"{chart.metric}_by_{chart.x or DEFAULT_X}*"):
            if path.suffix in CHART_SUFFIXES and path not in kept:
                path.unlink()


def draw(chart: Chart, folder: Path) -> list[Path]:
    """Draw a chart as `zerobench chart` does and return its files; none where no row has a value for it."""
    try:
        return draw_charts(
            read_merged([folder]), folder / "charts", metric=chart.metric, x=chart.x, by=chart.by
        )[0]
    except ConfigError:  # no row has a value
        return []
