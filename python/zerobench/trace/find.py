"""The trace that is meant by a file, or by results and a row. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from zerobench.bench.output import TRACES
from zerobench.bench.rank.trace_file import SUFFIX, Trace, read_trace, trace_path
from zerobench.errors import DataError, did_you_mean


def find_trace(place: str) -> Trace:
    """Return the trace at ``FILE``, ``RESULTS#ROW``, or ``RESULTS`` where only one row left a trace."""
    path, has_name, row = place.partition("#")
    given = Path(path)
    if not has_name and not given.is_dir() and given.name != "results.json":
        return read_trace(given)
    folder = (given if given.is_dir() else given.parent) / TRACES
    rows = sorted(file.name.removesuffix(SUFFIX) for file in folder.glob(f"*{SUFFIX}"))
    if not rows:
        raise DataError(f"{folder} holds no traces: run `zerobench compare --trace`")
    if not has_name and len(rows) == 1:
        row = rows[0]
    if row not in rows:
        hint = did_you_mean(row, rows, cutoff=0.4) if has_name else ""
        problem = f"no trace is of row {row!r}" if has_name else "several rows have traces"
        raise DataError(f"{problem}: {hint}name one, as in {path}#{rows[0]}; the rows are {', '.join(rows)}")
    return read_trace(trace_path(folder, row))
