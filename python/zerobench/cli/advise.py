"""`zerobench advise`: the row to take, and why. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerobench.cli.options import AsJson
from zerobench.cli.results import ResultPaths
from zerobench.errors import ConfigError, did_you_mean
from zerobench.host.consoles import plain_console, print_document
from zerobench.report.advice.goals import DEFAULT_GOAL, GOALS
from zerobench.results.sizes import GIB, bytes_text, ms_text

if TYPE_CHECKING:
    from zerobench.report.advice.advise import Advice
    from zerobench.results.schema import Results, Row


def advise(
    results: ResultPaths,
    goal: Annotated[str, typer.Option(help=f"What makes a row better: {', '.join(GOALS)}.")] = DEFAULT_GOAL,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="GiB of its device that a rank may use: rows with a higher peak count as oom."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the rows that are correct and fit, name the bottleneck, and say what would help."""
    from zerobench.report.advice.advise import advice_on
    from zerobench.results.merging import read_merged

    if goal not in GOALS:
        raise ConfigError(
            f"unknown --goal {goal!r}: {did_you_mean(goal, GOALS)}use one of {', '.join(GOALS)}"
        )
    if memory_limit is not None and not 0 < memory_limit < float("inf"):
        raise ConfigError(f"--memory-limit {memory_limit:g} must be above 0: give GiB, such as 40")
    limit_bytes = None if memory_limit is None else int(memory_limit * GIB)
    found = [
        (
            merged.results,
            merged.difference,
            advice_on(merged.results, GOALS[goal], memory_limit_bytes=limit_bytes),
        )
        for merged in read_merged(results)
    ]
    if as_json:
        verdict = " ".join(_verdict(goal, read, advice) for read, _, advice in found)
        print_document(verdict, _content(goal, found))
        return
    console = plain_console()
    for index, (read, difference, advice) in enumerate(found):
        for line in ([""] if index else []) + [difference] * bool(difference) + _lines(goal, read, advice):
            console.print(line, soft_wrap=True, highlight=False)


def _lines(goal: str, results: Results, given: Sequence[Advice]) -> list[str]:
    """Return the verdicts, then the ranking and the findings of each workload."""
    lines = [_verdict(goal, results, given)]
    for advice in given:
        lines += ["", f"{advice.head}:"] if advice.head else [""]
        lines += [
            f"{place}. {label}: {_figures(row, goal)}" for place, (label, row) in enumerate(advice.ranking, 1)
        ]
        lines += [f"not ranked: {text}" for text in advice.left_out]
        lines.append("")
        for finding in advice.findings:
            lines.append(finding.text)
            lines += [f"  what helps: {finding.cure}"] if finding.cure else []
    return lines


def _verdict(goal: str, results: Results, given: Sequence[Advice]) -> str:
    from zerobench.report.advice.advise import nothing_to_recommend

    return " ".join(advice.verdict for advice in given) or nothing_to_recommend(results, GOALS[goal])


def _figures(row: Row, goal: str) -> str:
    """Return the figure of the goal, then those of the others that are not the same again."""
    assert row.step_time_ms is not None
    texts = [
        GOALS[goal].figure(row),
        GOALS["throughput"].figure(row),
        f"{ms_text(row.step_time_ms.median)} a step",
    ]
    if row.peak_device_bytes:
        texts.append(f"{bytes_text(row.peak_device_bytes)} peak")
    if row.tokens_per_j is not None:
        texts.append(GOALS["energy"].figure(row))
    return ", ".join(dict.fromkeys(texts))


def _content(goal: str, found: Sequence[tuple[Results, str, Sequence[Advice]]]) -> dict[str, Any]:
    """Return the advice, ready for JSON."""
    return {
        "goal": goal,
        "workloads": [
            {
                "workload": advice.head,
                "ranking": [_ranked(label, row) for label, row in advice.ranking],
                "not_ranked": advice.left_out,
                "findings": [asdict(finding) for finding in advice.findings],
            }
            for _, _, given in found
            for advice in given
        ],
    }


def _ranked(label: str, row: Row) -> dict[str, Any]:
    assert row.step_time_ms is not None
    return {
        "name": row.name,
        "label": label,
        "step_time_ms": row.step_time_ms.median,
        "tokens_per_s": row.tokens_per_s,
        "peak_device_bytes": row.peak_device_bytes,
        "tokens_per_j": row.tokens_per_j,
    }
