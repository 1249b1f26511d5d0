"""Tables, plots and frames of result files. Imports neither torch nor the core, and each library only when used.

    import zerobench.report
    frame = zerobench.report.load("results/compare_20250101_120000")

``docs/metrics.md`` derives every figure.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advice import advise
    from .comparing import finish_rows
    from .frame import load, read_results, write_csv
    from .plots import write_plots
    from .stats import Ratio, median_of_ratios, summarise
    from .tables import render_table, table_text

_HOME = {
    "advise": "advice",
    "load": "frame",
    "read_results": "frame",
    "write_csv": "frame",
    "write_plots": "plots",
    "finish_rows": "comparing",
    "Ratio": "stats",
    "median_of_ratios": "stats",
    "summarise": "stats",
    "render_table": "tables",
    "table_text": "tables",
}

__all__ = [
    "Ratio",
    "advise",
    "finish_rows",
    "load",
    "median_of_ratios",
    "read_results",
    "render_table",
    "summarise",
    "table_text",
    "write_csv",
    "write_plots",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
