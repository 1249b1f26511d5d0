"""`zerobench network`: what the network cost in results. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from zerobench.cli.options import AsJson
from zerobench.cli.results import ResultPaths
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console, print_document
from zerobench.host.network import parse_network
from zerobench.report.network_predictions import HOSTS
from zerobench.strategies.catalogue import DEFAULT_BASELINES


def network(
    results: ResultPaths,
    at: Annotated[
        str,
        typer.Option(
            help="Networks to predict step times for, in addition to the measured ones: 25gbit,1gbit:0.2ms."
        ),
    ] = "",
    hosts: Annotated[
        str, typer.Option(help="Numbers of hosts to predict step times for, each of one device.")
    ] = ",".join(map(str, HOSTS)),
    baseline: Annotated[
        str,
        typer.Option(help="Strategy that break-even points are computed against: plain data parallelism."),
    ] = DEFAULT_BASELINES[0],
    as_json: AsJson = False,
) -> None:
    """Print what the network cost, where strategies break even, and step times on more hosts.

    Bytes and calls of a step by collective and phase, the share of the step that waited for the network, what bounds
    each row and what would move it. A model predicts step times from compute, bytes, bandwidth, latency and overlap;
    the last line gives its error on the measured points."""
    from zerobench.report.network_report import network_report, report_lines
    from zerobench.results.merging import read_merged

    networks = [name for name in at.split(",") if name]
    for name in networks:
        parse_network(name, source="--at")
    numbers = [_number(text) for text in hosts.split(",")]
    reports = [
        network_report(found.results, hosts=numbers, networks=networks, baseline=baseline)
        for found in read_merged(results)
    ]
    if as_json:
        print_document(_verdict(reports), reports[0] if len(reports) == 1 else {"reports": reports})
        return
    for report in reports:
        for line in report_lines(report):
            plain_console().print(line, soft_wrap=True, highlight=False, markup=False)


def _verdict(reports: Sequence[dict[str, Any]]) -> str:
    """Return which row spends the largest share of its step on the network."""
    rows = [row for report in reports for row in report["rows"] if row["network_share"] is not None]
    if not rows:
        return "no row on two ranks or more is ok, so there is no network to report"
    most = max(rows, key=lambda row: row["network_share"])
    return f"{most['name']} spends the most on the network: {100 * most['network_share']:.0f} % of its step"


def _number(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 2:
        raise ConfigError(
            f"--hosts {text!r} is not a number of hosts: use whole numbers from 2, such as 2,4,8"
        )
    return int(text)
