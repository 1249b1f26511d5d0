"""The table of columns: which direction is better, and what tells how far a value may be off."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Literal

Better = Literal["lower", "higher"]

DEFAULT_METRICS = ("step_time_ms.median", "peak_device_bytes")


class Repeats(Enum):
    """How well a column repeats when nothing changed."""

    AS_TIMES = auto()
    """As the step time: it drifts with the machine."""
    AS_BYTES = auto()
    """Within a known share of itself."""
    UNKNOWN = auto()
    """Only several runs tell."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the results."""

    column: str
    better: Better | None = None
    """None: neither direction is a regression."""
    repeats: Repeats = Repeats.UNKNOWN
    run_figure: str | None = None
    """The figure of runs that the column follows."""

    def word(self, *, is_more: bool) -> str:
        """Return the verdict on a change."""
        if self.better is None:
            return "higher" if is_more else "lower"
        is_worse = is_more == (self.better == "lower")
        if self.repeats is Repeats.AS_TIMES:
            return "slower" if is_worse else "faster"
        return "worse" if is_worse else "better"


_TIME, _BYTES, _UNKNOWN = Repeats.AS_TIMES, Repeats.AS_BYTES, Repeats.UNKNOWN
# The first pattern that fits a column decides.
_RULES: tuple[tuple[str, Better | None, Repeats, str | None], ...] = (
    ("step_time_ms.median", "lower", _TIME, "step_time_ms"),
    ("step_time_ms.mean", "lower", _TIME, "step_time_ms"),
    ("step_time_ms.*", "lower", _UNKNOWN, None),
    ("tokens_per_s", "higher", _TIME, "tokens_per_s"),
    ("samples_per_s", "higher", _TIME, "tokens_per_s"),
    ("tokens_per_s_per_peak_gb", "higher", _TIME, "tokens_per_s"),
    ("mfu.pct", "higher", _TIME, "tokens_per_s"),
    ("mfu.tflops_per_gpu", "higher", _TIME, "tokens_per_s"),
    ("energy_per_step_j", "lower", _UNKNOWN, "energy_per_step_j"),
    ("tokens_per_j", "higher", _UNKNOWN, "energy_per_step_j"),
    ("device_busy_pct", None, _UNKNOWN, "device_busy_pct"),
    ("peak_device_bytes", "lower", _BYTES, "peak_device_bytes"),
    ("peak_device_pct", "lower", _BYTES, "peak_device_bytes"),
    ("sampled.*", None, _UNKNOWN, None),
    ("settings.*", None, _UNKNOWN, None),
    ("peak_host_bytes", "lower", _UNKNOWN, None),
    ("*bytes*", "lower", _BYTES, None),
    ("relative*", "lower", _UNKNOWN, None),
    ("phases_ms.*", "lower", _UNKNOWN, None),
    ("bubble_pct", "lower", _UNKNOWN, None),
    ("duration_s", "lower", _UNKNOWN, None),
    ("validation_loss", "lower", _UNKNOWN, None),
    ("skipped_steps", "lower", _UNKNOWN, None),
    ("memory_change_pct", "lower", _UNKNOWN, None),
    ("speedup", "higher", _UNKNOWN, None),
    ("of_compute_only", "higher", _UNKNOWN, None),
    ("scaling_efficiency", "higher", _UNKNOWN, None),
    ("offload_practicality", "higher", _UNKNOWN, None),
    ("transfers.achieved_gb_s.*", "higher", _UNKNOWN, None),
)


def metric_of(column: str) -> Metric:
    """Return what is known of a column. Of one that no rule names, neither direction is better."""
    for pattern, better, repeats, run_figure in _RULES:
        if fnmatchcase(column, pattern):
            return Metric(column=column, better=better, repeats=repeats, run_figure=run_figure)
    return Metric(column=column)
