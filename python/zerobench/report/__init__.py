"""Tables, plots and frames of result files. Imports neither torch nor the core, and each library only when used.

    import zerobench.report
    frame = zerobench.report.load("results/compare_20250101_120000")

``docs/reference/metrics.md`` derives every figure.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerobench.report.advice.advise import advise
    from zerobench.report.charts import write_charts
    from zerobench.report.frame import load, write_csv
    from zerobench.report.plots import write_plots
    from zerobench.report.tables import render_table, table_text
    from zerobench.results.comparing import finish_rows
    from zerobench.results.files import read_results
    from zerobench.results.merging import read_merged
    from zerobench.results.rows import NOISE_SIGMAS, fastest, ratio_in_turn, row_labels
    from zerobench.results.stats import Ratio, median_of_ratios, ratio_error, summarise

_HOME = {
    "advise": "zerobench.report.advice.advise",
    "fastest": "zerobench.results.rows",
    "load": "zerobench.report.frame",
    "read_merged": "zerobench.results.merging",
    "read_results": "zerobench.results.files",
    "row_labels": "zerobench.results.rows",
    "write_charts": "zerobench.report.charts",
    "write_csv": "zerobench.report.frame",
    "write_plots": "zerobench.report.plots",
    "finish_rows": "zerobench.results.comparing",
    "NOISE_SIGMAS": "zerobench.results.rows",
    "Ratio": "zerobench.results.stats",
    "median_of_ratios": "zerobench.results.stats",
    "ratio_error": "zerobench.results.stats",
    "ratio_in_turn": "zerobench.results.rows",
    "summarise": "zerobench.results.stats",
    "render_table": "zerobench.report.tables",
    "table_text": "zerobench.report.tables",
}

__all__ = [
    "NOISE_SIGMAS",
    "Ratio",
    "advise",
    "fastest",
    "finish_rows",
    "load",
    "median_of_ratios",
    "ratio_error",
    "ratio_in_turn",
    "read_merged",
    "read_results",
    "render_table",
    "row_labels",
    "summarise",
    "table_text",
    "write_charts",
    "write_csv",
    "write_plots",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
