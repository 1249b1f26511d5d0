"""The row that is exported: the one that is named, else the advised one. Imports no torch."""

from __future__ import annotations

from zerobench.errors import DataError, did_you_mean
from zerobench.report.advice.goals import advised_row
from zerobench.results.files import read_results
from zerobench.results.rows import by_workload
from zerobench.results.schema import Results, Row
from zerobench.strategies.catalogue import FLOOR, REFERENCE

_NOT_A_CHOICE = (FLOOR, REFERENCE)


def chosen_row(place: str) -> tuple[Results, Row]:
    """Return the results at ``RESULTS`` or ``RESULTS#ROW``, and the row. Without a name it is the row that
    `zerobench advise` names, of results with one workload. Raises DataError for a row that is not there or cannot be
    used."""
    path, has_name, name = place.partition("#")
    results = read_results(path)
    return results, named_row(results, name) if has_name else default_row(results)


def named_row(results: Results, name: str) -> Row:
    found = [row for row in results.rows if row.name == name]
    if not found:
        names = [row.name for row in results.rows]
        hint = did_you_mean(name, names, cutoff=0.4)
        raise DataError(f"no row is named {name!r}: {hint}the rows are {', '.join(names)}")
    (row,) = found
    if row.strategy in _NOT_A_CHOICE:
        raise DataError(
            f"row {name} is {row.strategy}, which does not train on several ranks: name another row"
        )
    if row.status != "ok":
        raise DataError(f"row {name} is {row.status} ({row.error}): name a row that is ok")
    return row


def default_row(results: Results) -> Row:
    workloads = by_workload(results.rows)
    if len(workloads) > 1:
        raise DataError(
            f"the results hold {len(workloads)} workloads, so no row is the fastest of all: name one, as in "
            f"RESULTS#{results.rows[0].name}"
        )
    candidates = [row for row in results.rows if row.strategy not in _NOT_A_CHOICE]
    best = advised_row(candidates)
    if best is None:
        raise DataError("no row is ok and comparable: name one, as in RESULTS#ROW")
    return best
