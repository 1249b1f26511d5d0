"""Write and print the charts and sentences that end a recipe."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from zerobench.errors import ConfigError
from zerobench.recipes.known import KNOWN
from zerobench.recipes.recipe import Chart, Recipe
from zerobench.report.charts import write_charts
from zerobench.report.losses import write_loss_charts
from zerobench.results.files import cannot_be_written, write_atomically
from zerobench.results.merging import read_merged
from zerobench.results.schema import Results


def conclude(recipe: Recipe, results: Results, folder: Path, *, console: Console) -> None:
    """Write charts/ and conclusions.txt into the result folder and print the sentences and the paths."""
    lines = sentences(recipe, results)
    path = folder / "conclusions.txt"
    try:
        write_atomically(path, "".join(f"{line}\n" for line in [recipe.question, "", *lines]).encode())
        path = folder / "charts"
        drawn = [drawn for chart in recipe.charts for drawn in draw(chart, folder)]
    except OSError as error:
        raise cannot_be_written(path, error) from None
    for line in (f"\n{recipe.question}", *lines, *map(str, drawn)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def sentences(recipe: Recipe, results: Results) -> list[str]:
    """Return the sentences that the rows support."""
    return [text for name in recipe.conclude for text in KNOWN[name](results)]


def draw(chart: Chart, folder: Path) -> list[Path]:
    """Draw a chart as `zerobench chart` does and return its files; none where no row has a value for it."""
    found, target = read_merged([folder]), folder / "charts"
    try:
        if chart.metric == "loss":
            return list(write_loss_charts(found, target)[0])
        return list(write_charts(found, target, metric=chart.metric, x=chart.x, by=chart.by))
    except ConfigError:  # no row has a value
        return []
