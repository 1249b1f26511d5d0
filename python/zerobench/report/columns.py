"""The columns of the comparison's table: titles, units and texts of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerobench.report.column import (
    ABSENT,
    ALWAYS,
    LAST,
    Column,
    bytes_cell,
    cells_of,
    change_cell,
    decimals_for,
)
from zerobench.report.use_columns import energy_columns, phase_columns, use_columns
from zerobench.results.rows import (
    checksum_marks,
    dtype_text,
    flat_settings,
    is_known,
    row_labels,
    setting_text,
    setting_word,
    varying_settings,
)
from zerobench.results.schema import Row
from zerobench.results.sizes import memory_unit, rate_text
from zerobench.strategies.catalogue import FLOOR


def table_columns(rows: Sequence[Row]) -> list[Column]:
    """Every column that a table may have, the least important last to be kept."""
    # Right before fast: no speed and no memory is printed for a row whose parameters are wrong.
    shown = [row if row.status == "ok" else None for row in rows]
    base = _baseline_word(rows)
    unit, unit_bytes = memory_unit(row.peak_device_bytes for row in shown if row is not None)
    # Where steps are of different sizes, their times alone do not compare.
    sizes_differ = not {"batch_size", "seq_length", "grad_accum"}.isdisjoint(varying_settings(rows)[0])
    sizes_differ = sizes_differ or any(row.search for row in rows)
    columns = [
        *_name_columns(rows),
        *_search_columns(shown),
        Column(
            title="status", unit="", cells=[row.status for row in rows], keep=ALWAYS, left=True, folds=False
        ),
        Column(title="step", unit=_step_unit(shown), cells=_step_cells(shown), keep=ALWAYS),
        Column(
            title="tokens",
            unit="per s",
            cells=cells_of(shown, _tokens_cell),
            keep=ALWAYS if sizes_differ else 80,
        ),
        Column(title="relative", unit="1 = fastest", cells=cells_of(shown, _relative_cell), keep=90),
        Column(title="of", unit=FLOOR, cells=cells_of(shown, _floor_cell), keep=85),
        Column(title="MFU", unit="%", cells=cells_of(shown, _mfu_cell), keep=65),
        Column(title="speedup", unit=f"vs {base}", cells=cells_of(shown, _speedup_cell), keep=50),
        Column(
            title="peak",
            unit=unit,
            cells=cells_of(shown, lambda row: bytes_cell(row.peak_device_bytes, unit_bytes)),
            keep=LAST,
        ),
        Column(
            title="memory",
            unit=f"vs {base}",
            cells=cells_of(shown, lambda row: change_cell(row.memory_change_pct)),
            keep=60,
        ),
        Column(title="of the row", unit="not offloaded", cells=cells_of(shown, _practicality_cell), keep=75),
        Column(title="off device", unit="of the state", cells=cells_of(shown, _share_cell), keep=56),
        Column(title="verdict", unit="", cells=[row.verdict or ABSENT for row in rows], keep=45, left=True),
        *_tier_columns(shown),
        *_transfer_columns(shown),
        *_host_columns(shown),
        _traffic_column(shown),
        Column(title="power", unit="W/GPU", cells=cells_of(shown, _power_cell), keep=25),
        *energy_columns(shown),
        *_bubble_columns(shown),
        Column(title="graphs", unit="a step", cells=cells_of(shown, _graphs_cell), keep=40),
        Column(title="update", unit="deviation", cells=_deviation_cells(rows), keep=70),
        Column(title="dtypes", unit="p/c/r/m/s", cells=_dtype_cells(rows), keep=30, left=True),
    ]
    return [*columns, *phase_columns(shown), *use_columns(shown, base)]


def _name_columns(rows: Sequence[Row]) -> list[Column]:
    """The strategy and the settings in which rows differ; or the rows' names, where those do not tell rows apart."""
    labels = row_labels(rows)
    if labels == [row.name for row in rows]:
        return [Column(title="row", unit="", cells=labels, keep=ALWAYS, left=True)]
    columns = [
        Column(title="strategy", unit="", cells=[row.strategy for row in rows], keep=ALWAYS, left=True)
    ]
    for key in varying_settings(rows)[0]:
        cells = [setting_text(flat_settings(row).get(key)) if is_known(key, row) else ABSENT for row in rows]
        numeric = all(cell.replace(".", "", 1).isdigit() for cell in cells if cell != ABSENT)
        columns.append(
            Column(title=setting_word(key), unit="", cells=cells, keep=ALWAYS, left=not numeric, folds=False)
        )
    return columns


def _search_columns(rows: Sequence[Row | None]) -> list[Column]:
    """Return the largest value that --find found for each row, and how many values it took."""
    words = {row.search.setting for row in rows if row is not None and row.search is not None}
    largest = cells_of(rows, _largest_cell)
    tried = cells_of(rows, lambda row: None if row.search is None else str(row.search.try_num))
    return [
        Column(title="largest", unit=words.pop() if len(words) == 1 else "", cells=largest, keep=98),
        Column(title="values", unit="tried", cells=tried, keep=28),
    ]


def _largest_cell(row: Row) -> str | None:
    return None if row.search is None or row.search.largest is None else str(row.search.largest)


def _step_unit(rows: Sequence[Row | None]) -> str:
    return "ms ± std of runs" if _have_runs(rows) else "ms ± MAD"


def _have_runs(rows: Sequence[Row | None]) -> bool:
    """Return whether every row that has a step time was measured in several runs."""
    timed = [row for row in rows if row is not None and row.step_time_ms is not None]
    return bool(timed) and all(row.over_runs for row in timed)


def _step_cells(rows: Sequence[Row | None]) -> list[str]:
    """The median over steps with its MAD, or the median of runs with their standard deviation."""
    found = [_step_figures(row, of_runs=_have_runs(rows)) for row in rows]
    decimals = decimals_for([figures[0] for figures in found if figures is not None])
    spreads = ["" if one is None or one[1] is None else f" ± {one[1]:.{decimals}f}" for one in found]
    width = max(map(len, spreads), default=0)
    marks = _marks([row is not None and row.busy is not None for row in rows], "‡")
    return [
        ABSENT if one is None else f"{one[0]:.{decimals}f}{_right(spread, width)}{mark}"
        for one, spread, mark in zip(found, spreads, marks, strict=True)
    ]


def _step_figures(row: Row | None, *, of_runs: bool) -> tuple[float, float | None] | None:
    time = row.step_time_ms if row is not None else None
    if row is None or time is None:
        return None
    if of_runs and row.over_runs:
        return row.over_runs["step_time_ms"].median, row.over_runs["step_time_ms"].std
    return time.median, time.mad if len(time.samples) > 1 else None


def _marks(marked: Sequence[bool], mark: str) -> list[str]:
    """The mark or as many blanks, where any row has it."""
    return [(f" {mark}" if one else "  ") if any(marked) else "" for one in marked]


def _right(spread: str, width: int) -> str:
    """Such as " ±  0.1"; blank of one sample, which shows none."""
    return spread[:3] + spread[3:].rjust(width - 3) if spread else " " * width


def _tokens_cell(row: Row) -> str | None:
    if row.tokens_per_s is None:
        return None
    return rate_text(row.tokens_per_s) + ("" if row.comparable else " †")


def _relative_cell(row: Row) -> str | None:
    if row.relative is None:
        return None
    spread = row.relative_uncertainty
    return f"{row.relative:.2f}" + (f" ± {spread:.2f}" if spread is not None else "       ")


def _speedup_cell(row: Row) -> str | None:
    return None if row.speedup is None else f"{row.speedup:.2f}x"


def _floor_cell(row: Row) -> str | None:
    return None if row.of_compute_only is None else f"{100 * row.of_compute_only:.1f} %"


def _practicality_cell(row: Row) -> str | None:
    return None if row.offload_practicality is None else f"{100 * row.offload_practicality:.0f} %"


def _share_cell(row: Row) -> str | None:
    """Return the share that --offload-ratio came to; None if no share was asked for."""
    asked = row.settings.offload_ratio
    if asked is None or row.transfers is None or row.transfers.offload_ratio is None:
        return None
    return f"{row.transfers.offload_ratio:.3g}" + (" (auto)" if asked == "auto" else "")


def _tier_columns(rows: Sequence[Row | None]) -> list[Column]:
    """Return the columns for what offloaded rows hold off the device."""
    columns = []
    for tier, word in (("host", "on host"), ("nvme", "on NVMe")):
        held = [
            sum(((row.memory_bytes or {}).get(tier) or {}).values()) or None if row is not None else None
            for row in rows
        ]
        unit, unit_bytes = memory_unit(held)
        cells = [bytes_cell(value, unit_bytes) or ABSENT for value in held]
        columns.append(Column(title=word, unit=unit, cells=cells, keep=55))
    return columns


def _transfer_columns(rows: Sequence[Row | None]) -> list[Column]:
    """Bytes that offloaded rows move in a step."""
    columns = []
    for name, word in (
        ("to_host_bytes", "to host"),
        ("to_device_bytes", "to device"),
        ("nvme_read_bytes", "read"),
        ("nvme_written_bytes", "written"),
    ):
        moved = [getattr(row.transfers, name) if row is not None and row.transfers else None for row in rows]
        unit, unit_bytes = memory_unit(moved)
        cells = [bytes_cell(value, unit_bytes) or ABSENT for value in moved]
        columns.append(Column(title=word, unit=f"{unit}/step", cells=cells, keep=22, group="transfers"))
    return columns


def _host_columns(rows: Sequence[Row | None]) -> list[Column]:
    """Return the columns for what offloaded rows take of the host, and for how much of link and disk they use."""
    offloaded = [row if row is not None and row.transfers is not None else None for row in rows]
    columns = []
    for word, held in (
        ("pinned", [row.transfers.pinned_bytes if row and row.transfers else None for row in offloaded]),
        ("process", [row.peak_host_bytes if row and any(offloaded) else None for row in rows]),
    ):
        unit, unit_bytes = memory_unit(held)
        cells = [bytes_cell(value, unit_bytes) or ABSENT for value in held]
        columns.append(Column(title=word, unit=unit, cells=cells, keep=21, group="host"))
    over = Column(
        title="over", unit="asked", cells=cells_of(offloaded, _pinned_excess_cell), keep=21, group="host"
    )
    columns.insert(1, over)
    for word, text in (("of link", _link_cell), ("of disk", _disk_cell)):
        columns.append(
            Column(title=word, unit="limit", cells=cells_of(offloaded, text), keep=23, group="limits")
        )
    return columns


def _pinned_excess_cell(row: Row) -> str | None:
    found = row.transfers
    if found is None or not found.pinned_bytes or not found.pinned_requested_bytes:
        return None
    return f"{100 * (found.pinned_bytes / found.pinned_requested_bytes - 1):+.1f} %"


def _link_cell(row: Row) -> str | None:
    """Return the use of the link in the direction that is used more."""
    return _use_cell(row, [(("to_host",), "to_host"), (("to_device",), "to_device")])


def _disk_cell(row: Row) -> str | None:
    """Reads and writes together, of what the files give when both run."""
    return _use_cell(row, [(("nvme_read", "nvme_write"), "nvme_both")])


def _use_cell(row: Row, uses: Sequence[tuple[tuple[str, ...], str]]) -> str | None:
    achieved = (row.transfers.achieved_gb_s if row.transfers else None) or {}
    limits = (row.transfers.limit_gb_s if row.transfers else None) or {}
    shares = [
        sum(achieved[way] for way in ways) / limits[limit]
        for ways, limit in uses
        if limits.get(limit) and all(way in achieved for way in ways)
    ]
    return f"{100 * max(shares):.0f} %" if shares else None


def _mfu_cell(row: Row) -> str | None:
    return None if row.mfu is None else f"{row.mfu.pct:.1f}"


def _power_cell(row: Row) -> str | None:
    return None if row.sampled is None or row.sampled.power_w is None else f"{row.sampled.power_w:.0f}"


def _traffic_column(rows: Sequence[Row | None]) -> Column:
    """Return the column for what a rank moves in collectives, with absent cells if no rank moves anything."""
    moved = [row.communication_bytes if row is not None else None for row in rows]
    unit, unit_bytes = memory_unit(moved)
    cells = (
        [bytes_cell(value, unit_bytes) or ABSENT for value in moved] if any(moved) else [ABSENT] * len(rows)
    )
    return Column(title="moved", unit=f"{unit}/step", cells=cells, keep=19)


def _bubble_columns(rows: Sequence[Row | None]) -> list[Column]:
    """Return the idle share of pipelines, measured and by the formula."""
    columns = []
    for name, unit in (("bubble_pct", "%"), ("bubble_formula_pct", "% by formula")):
        values = [getattr(row, name) if row is not None else None for row in rows]
        cells = [ABSENT if value is None else f"{value:.1f}" for value in values]
        columns.append(Column(title="bubble", unit=unit, cells=cells, keep=42, group="bubble"))
    return columns


def _graphs_cell(row: Row) -> str | None:
    return None if row.compiled_graphs is None else f"{row.compiled_graphs:g}"


def _baseline_word(rows: Sequence[Row]) -> str:
    names = {row.baseline for row in rows if row.baseline}
    words = {row.strategy for row in rows if row.name in names}
    return words.pop() if len(words) == 1 else "baseline"


def _deviation_cells(rows: Sequence[Row]) -> list[str]:
    marks = checksum_marks(rows)
    pad = any(marks)
    cells = []
    for row, mark in zip(rows, marks, strict=True):
        update = row.deviation.update if row.deviation else None
        if update is not None and not math.isfinite(update):
            update = None  # as result files have it
        if update is None and not mark:
            cells.append(ABSENT)
            continue
        number = ABSENT if update is None else "0" if update == 0 else f"{update:.1e}"
        cells.append(f"{number} {mark or ' '}" if pad else number)
    return cells


def _dtype_cells(rows: Sequence[Row]) -> list[str]:
    texts = [dtype_text(row) for row in rows]
    if len({text for text in texts if text}) < 2:
        return [ABSENT] * len(rows)
    return [text or ABSENT for text in texts]
