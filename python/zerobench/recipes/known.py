"""Every function of conclusions that a recipe may name."""

from __future__ import annotations

from collections.abc import Callable

from zerobench.recipes.network_conclusions import network_break_even, network_error, network_winners
from zerobench.recipes.slow_network_study import slow_network_claims, slow_network_rows
from zerobench.report.conclusions import CONCLUSIONS
from zerobench.results.schema import Results

KNOWN: dict[str, Callable[[Results], list[str]]] = {
    **CONCLUSIONS,
    **{
        function.__name__: function
        for function in (
            network_break_even,
            network_error,
            network_winners,
            slow_network_claims,
            slow_network_rows,
        )
    },
}
"""By the name that ``conclude`` gives."""
