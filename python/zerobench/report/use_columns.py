"""The columns of what a row uses of its machine: time by phase, device, host, energy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zerobench.report.column import ABSENT, Column, bytes_cell, cells_of, change_cell, decimals_for
from zerobench.report.phases import phases_change_pct, phases_pct
from zerobench.results.schema import Row
from zerobench.results.sizes import memory_unit, rate_text

PHASE_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optim.",
    "exposed_communication": "comm.",
    "host_bound": "host",
    "exposed_offload": "offload",
    "exposed_io": "I/O",
}


def phase_columns(rows: Sequence[Row | None]) -> list[Column]:
    values = [value for row in rows if row is not None for value in (row.phases_ms or {}).values()]
    decimals = min(1, decimals_for(values))
    by_row = [(row.phases_ms if row is not None else None) or {} for row in rows]
    return _columns_by_phase(
        by_row, lambda time_ms: f"{time_ms:.{decimals}f}", unit="ms", keep=20, group="phases"
    )


def _columns_by_phase(
    by_row: Sequence[Mapping[str, float]],
    text: Callable[[float], str | None],
    *,
    unit: str,
    keep: int,
    group: str,
) -> list[Column]:
    known = list(PHASE_WORDS)
    phases = sorted(
        {phase for found in by_row for phase in found},
        key=lambda phase: (known.index(phase) if phase in PHASE_WORDS else len(known), phase),
    )
    return [
        Column(
            title=PHASE_WORDS.get(phase, phase.replace("_", " ")),
            unit=unit,
            cells=[(text(found[phase]) if phase in found else None) or ABSENT for found in by_row],
            keep=keep,
            group=group,
        )
        for phase in phases
    ]


def energy_columns(rows: Sequence[Row | None]) -> list[Column]:
    """Return the columns of energy per step over all GPUs and of time at the power cap."""
    columns = []
    for title, unit, name in (("energy", "J/step", "energy_per_step_j"), ("tokens", "per J", "tokens_per_j")):
        values = [getattr(row, name) if row is not None else None for row in rows]
        decimals = decimals_for([value for value in values if value is not None])
        cells = [ABSENT if value is None else f"{value:,.{decimals}f}" for value in values]
        columns.append(Column(title=title, unit=unit, cells=cells, keep=18, group="energy"))
    share = Column(
        title="at power", unit="cap", cells=cells_of(rows, _power_cap_cell), keep=18, group="energy"
    )
    return [*columns, share]


def _power_cap_cell(row: Row) -> str | None:
    share = row.sampled.power_cap_pct if row.sampled is not None else None
    return None if share is None else f"{share:.0f} %"


def use_columns(rows: Sequence[Row | None], base: str) -> list[Column]:
    """The columns that only wide tables have. ``base``: what they call the baseline."""
    shown = [row for row in rows if row is not None]
    shares = [phases_pct(row) if row is not None else {} for row in rows]
    changes = [phases_change_pct(row, shown) if row is not None else {} for row in rows]
    return [
        *_machine_columns(rows),
        *_columns_by_phase(shares, lambda pct: f"{pct:.0f}", unit="% of step", keep=11, group="phases in %"),
        *_columns_by_phase(changes, change_cell, unit=f"vs {base}", keep=10, group=f"phases vs {base}"),
    ]


def _machine_columns(rows: Sequence[Row | None]) -> list[Column]:
    # Tables with offloaded rows have it next to the memory that these pin.
    offloads = any(row is not None and row.transfers is not None for row in rows)
    host = [row.peak_host_bytes if row is not None and not offloads else None for row in rows]
    unit, unit_bytes = memory_unit(host)
    figures = (
        ("samples", "per s", cells_of(rows, lambda row: _rate_cell(row.samples_per_s))),
        ("tokens", "/s per peak GB", cells_of(rows, lambda row: _rate_cell(row.tokens_per_s_per_peak_gb))),
        ("scaling", "efficiency", cells_of(rows, lambda row: _share_cell(row.scaling_efficiency, 100.0))),
        ("GPU busy", "profiled", cells_of(rows, lambda row: _share_cell(row.device_busy_pct))),
        ("GPU busy", "driver", cells_of(rows, lambda row: _share_cell(row.device_utilisation_pct))),
        ("peak", "of device", cells_of(rows, lambda row: _share_cell(row.peak_device_pct))),
        ("process", unit, [bytes_cell(value, unit_bytes) or ABSENT for value in host]),
    )
    return [
        Column(title=title, unit=unit, cells=cells, keep=12, group="use") for title, unit, cells in figures
    ]


def _rate_cell(rate: float | None) -> str | None:
    return None if rate is None else rate_text(rate)


def _share_cell(share: float | None, scale: float = 1.0) -> str | None:
    return None if share is None else f"{scale * share:.0f} %"
