"""Charts by the word that asks for them: a column over a setting, loss curves, or what a step and memory consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench.errors import ConfigError
from zerobench.report.charts import save, write_charts
from zerobench.report.frame import is_numeric_column
from zerobench.report.losses import write_loss_charts
from zerobench.report.plots import memory_figure, step_time_figure
from zerobench.report.series import axis_keys
from zerobench.results.merging import Merged
from zerobench.results.schema import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS = "loss"
_SPLITS: dict[str, Callable[[Results], Figure | None]] = {"phases": step_time_figure, "memory": memory_figure}
LOSS_SERIES = ("strategy", "precision")
DEFAULT_X, DEFAULT_BY = "batch", "strategy"


def expect_axes(metric: str, x: str | None, by: str | None) -> None:
    """Raise ConfigError for axes that a chart of ``metric`` cannot have."""
    if metric != LOSS and metric not in _SPLITS:
        axis_keys(x or DEFAULT_X, by or DEFAULT_BY)
        return
    if metric == LOSS and x is None and by is not None:
        if by not in LOSS_SERIES:
            raise ConfigError(f"--by {by!r} is unknown with --metric loss: give {' or '.join(LOSS_SERIES)}")
        return
    if x is not None or by is not None:
        drawn = "over steps with a line for each row" if metric == LOSS else "as a bar for each row"
        raise ConfigError(
            f"--{'x' if x is not None else 'by'} has no effect with --metric {metric}, which is drawn {drawn}. Remove "
            "the option."
        )


def expect_metric(metric: str) -> None:
    """Raise ConfigError for a metric that no row of this version can have."""
    words = (LOSS, *_SPLITS)
    if metric not in words and not is_numeric_column(metric):
        raise ConfigError(
            f"--metric {metric!r} is not a numeric column of results.csv: give one, such as tokens_per_s, "
            f"step_time_ms.median or phases_ms.forward, or one of {', '.join(words)}"
        )


def draw(
    merged: Sequence[Merged], folder: Path, *, metric: str, x: str | None, by: str | None
) -> tuple[list[Path], list[str]]:
    """Draw charts as PNG and SVG into ``folder``. Return their paths, and sentences that belong to them.

    Raises ConfigError where no row has values, and OSError."""
    if metric == LOSS:
        return write_loss_charts(merged, folder, by_precision=by == "precision")
    if metric in _SPLITS:
        return _write_split(merged, folder, metric), []
    return write_charts(merged, folder, metric=metric, x=x or DEFAULT_X, by=by or DEFAULT_BY), []


def _write_split(merged: Sequence[Merged], folder: Path, metric: str) -> list[Path]:
    """Draw the bars of each machine or version."""
    paths = []
    for number, found in enumerate(merged, 1):
        figure = _SPLITS[metric](found.results)
        if figure is not None:
            paths += save(figure, folder, metric if number == 1 else f"{metric}_{number}")
    if not paths:
        raise ConfigError(
            f"no ok row has {metric}, so there is nothing to draw: `zerobench show` says why rows failed"
        )
    return paths
