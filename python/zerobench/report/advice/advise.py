"""Advice on result files: the row to take for a goal, and what the rules find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerobench.report.advice.goals import DEFAULT_GOAL, GOALS, Goal, best_first
from zerobench.report.advice.rule import Finding, Scene, findings
from zerobench.report.advice.rules import RULES
from zerobench.results.comparing import finish_rows
from zerobench.results.rows import (
    by_workload,
    is_ranked,
    may_be_ranked,
    row_labels,
    ties_with_fastest,
    workload_heads,
)
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import GIB, bytes_text, join_words
from zerobench.strategies.catalogue import FLOOR


@dataclass(frozen=True)
class Advice:
    """Advice on the rows of one workload, or of all where the goal ranks across them."""

    head: str
    """What tells the workload apart; empty where there is one."""
    goal: Goal
    ranking: list[tuple[str, Row]]
    """Labels and rows, the advised one first."""
    left_out: list[str]
    """Why other rows are not ranked."""
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        label, row = self.ranking[0]
        take = f"{self.head}: take" if self.head else "Take"
        return f"{take} {label} for the {self.goal.what}: {self.goal.figure(row)}.{self._tie}"

    @property
    def _tie(self) -> str:
        """Return the sentence on rows that are as fast, where speed is the goal."""
        if self.goal.name != DEFAULT_GOAL:
            return ""
        tied = [label for label, row in self.ranking[1:] if ties_with_fastest(row)]
        return f" {join_words(tied)} tie{'s' if len(tied) == 1 else ''} with it." if tied else ""


def advise(results: Results) -> list[str]:
    """Return sentences about rows that are ok and comparable; several workloads get one text each. The last sentences
    name the largest setting that fits, where the comparison searched for it or no row fits."""
    return [*_sentences(results), *results.closing]


def _sentences(results: Results) -> list[str]:
    given = advice_on(results)
    if not given:
        return [nothing_to_recommend(results)]
    texts = [[finding.whole for finding in advice.findings] for advice in given]
    if len(texts) == 1:
        return texts[0]
    return [f"{advice.head}: {' '.join(text)}" for advice, text in zip(given, texts, strict=True)]


def advice_on(
    results: Results, goal: Goal = GOALS[DEFAULT_GOAL], *, memory_limit_bytes: int | None = None
) -> list[Advice]:
    """Return advice on each workload that has a row to recommend, or one for all where the goal ranks across them.

    ``memory_limit_bytes`` is the most that a rank may use of its device: rows with a higher peak count as oom."""
    if memory_limit_bytes is not None:
        results = _limited(results, memory_limit_bytes)
    groups = [results.rows] if goal.across_workloads else by_workload(results.rows)
    found = [(rows, ranking) for rows in groups if (ranking := best_first(rows, goal))]
    heads = workload_heads([rows[0] for rows, _ in found]) if len(found) > 1 else [""] * len(found)
    return [
        _advice(head, goal, rows, ranking, results.machine)
        for head, (rows, ranking) in zip(heads, found, strict=True)
    ]


def nothing_to_recommend(results: Results, goal: Goal = GOALS[DEFAULT_GOAL]) -> str:
    """Return the sentence for results without a row to recommend."""
    if any(is_ranked(row) for row in results.rows):
        return f"Nothing to recommend: no row that is correct both fits and has a figure for the {goal.what}."
    if any(row.status == "ok" and row.comparable and not may_be_ranked(row) for row in results.rows):
        return "Nothing to recommend: the machine was busy. Measure again once nothing else runs on it."
    return "Nothing to recommend: no row is both correct and comparable."


def _advice(
    head: str, goal: Goal, rows: Sequence[Row], ranking: Sequence[Row], machine: dict[str, Any]
) -> Advice:
    labels = dict(zip(map(id, rows), row_labels(rows), strict=True))
    (workload,) = [alike for alike in by_workload(rows) if any(row is ranking[0] for row in alike)]
    scene = Scene(rows=workload, machine=machine, advised=ranking[0], labels=labels)
    left_out = [
        f"{labels[id(row)]} ({_reason(row)})"
        for row in rows
        if row.strategy != FLOOR and not any(row is ranked for ranked in ranking)
    ]
    return Advice(
        head=head,
        goal=goal,
        ranking=[(labels[id(row)], row) for row in ranking],
        left_out=left_out,
        findings=findings(RULES, scene),
    )


def _reason(row: Row) -> str:
    if row.status != "ok":
        return row.status if row.error is None else f"{row.status}: {row.error}"
    if not row.comparable:
        return "other dtypes"
    return "no figure for this goal" if may_be_ranked(row) else "the machine was busy"


def _limited(results: Results, limit_bytes: int) -> Results:
    """Return the results as if devices had no more memory than the limit."""
    found = results.model_copy(deep=True)
    for row in found.rows:
        asked = row.settings.device_memory_gib
        row.settings.device_memory_gib = min(
            limit_bytes / GIB, asked if asked is not None else limit_bytes / GIB
        )
        peak = row.peak_device_bytes or 0
        if row.status == "ok" and peak > limit_bytes:
            row.status, row.oom_tier = "oom", "device"
            row.error = f"its peak of {bytes_text(peak)} is above --memory-limit"
    finish_rows(found)
    return found
