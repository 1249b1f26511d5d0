"""`zerobench trace`: where the time of a traced step goes. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from zerobench.cli.options import AsJson
from zerobench.host.consoles import plain_console, print_document

if TYPE_CHECKING:
    from zerobench.bench.rank.trace_file import Trace
    from zerobench.trace.account import Account


def trace(
    place: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RESULTS#ROW",
            help="A file of `compare --trace`, or a results folder and the name of a row.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Show busy, exposed and idle time of a traced step by lane and unit, and what the device waited for."""
    from zerobench.trace.account import account_of
    from zerobench.trace.find import find_trace

    found = find_trace(place)
    account = account_of(found)
    if as_json:
        facts = {"row": found.row, "strategy": found.strategy, "device": found.device, "rank": found.rank}
        print_document(verdict(found, account), {**facts, "note": found.note, **asdict(account)})
        return
    console = plain_console()
    for text in filter(None, (verdict(found, account), found.note)):
        console.print(text, soft_wrap=True, highlight=False)
    for table in tables(account):
        console.print()
        console.print(table)


def verdict(found: Trace, account: Account) -> str:
    """Return one sentence: how much of the step is busy, and what computing waits for most."""
    head = (
        f"{found.row}, rank {found.rank}: a step of {_ms(account.step_us)} ms is busy for "
        f"{_share(account.busy_us, account)} of its time."
    )
    if not account.waited_us:
        return f"{head} Computing never waits."
    lane, waited_us = next(iter(account.waited_us.items()))
    return f"{head} Computing waits most for {lane}: {_ms(waited_us)} ms."


def tables(account: Account) -> list[Table]:
    """Return the tables of lanes, of units and of waits, without those that would be empty."""
    lanes = _table("lane", "operations", "busy ms", "busy", "exposed ms", "idle ms")
    for use in account.lanes:
        exposed = "" if use.exposed_us is None else _ms(use.exposed_us)
        share = _share(use.busy_us, account)
        lanes.add_row(use.lane, str(use.operations), _ms(use.busy_us), share, exposed, _ms(use.idle_us))
    waited = _table("computing waits for", "ms", "of the step")
    for lane, waited_us in account.waited_us.items():
        waited.add_row(lane, _ms(waited_us), _share(waited_us, account))
    found = [lanes, _unit_table(account), waited]
    return [table for table in found if table.row_count]


def _unit_table(account: Account) -> Table:
    """Return the busy and exposed milliseconds of each unit, by lane."""
    names = [use.lane for use in account.lanes if any(unit.lane == use.lane for unit in account.units)]
    table = _table("unit, busy (exposed) ms", *names)
    uses = {(use.unit, use.lane): use for use in account.units}
    for unit in dict.fromkeys(use.unit for use in account.units):
        cells = []
        for lane in names:
            use = uses.get((unit, lane))
            exposed = "" if use is None or use.exposed_us is None else f" ({_ms(use.exposed_us)})"
            cells.append("" if use is None else _ms(use.busy_us) + exposed)
        table.add_row(unit, *cells)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.3f}"


def _share(time_us: float, account: Account) -> str:
    return f"{100 * time_us / account.step_us:.1f} %" if account.step_us else "0 %"
