"""A diff as a plain table, as Markdown for a pull request, and as JSON. All begin with the verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zerobench.diff.differences import Diff, OnlyOne, Source, Table
from zerobench.diff.judge import CANNOT_TELL, SAME
from zerobench.diff.text import (
    HEADS,
    cells,
    counts_line,
    notes,
    only_one_text,
    source_lines,
    status_lines,
    title,
    verdict_line,
)

_QUIET = (SAME, CANNOT_TELL)
_LEFT = (0, 5, 6)  # places in HEADS of texts; the others are numbers
# What Markdown and HTML would take for more than text.
_SPECIAL = re.compile(r"[&<>|`*\[\]\\#~!$]|https?:|www\.|\b_|_\b")


def table_text(diff: Diff) -> str:
    """Return the diff for a terminal."""
    lines = [verdict_line(diff), *source_lines(diff)]
    for head, texts in _lists(diff):
        lines += ["", f"{head}:", *(f"  {text}" for text in texts)]
    for table in diff.tables:
        if table.rows:
            lines += ["", f"{title(table)}: {counts_line(table)}", *_aligned([list(HEADS), *cells(table)])]
            lines += notes(table)
    return "".join(f"{line}\n" for line in lines)


def _lists(diff: Diff) -> list[tuple[str, list[str]]]:
    """Return what is told of rows without figures in both files, under its heading."""
    found = [
        ("status changed", status_lines(diff.status_changes)),
        ("only in old", [only_one_text(one) for one in diff.vanished]),
        ("only in new", [only_one_text(one) for one in diff.appeared]),
    ]
    return [(head, texts) for head, texts in found if texts]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in _LEFT else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown_text(diff: Diff) -> str:
    """Return the diff for a comment: rows without a change are folded."""
    lines = [f"**{_escaped(verdict_line(diff))}**", ""]
    lines += [f"- {_escaped(line)}" for line in source_lines(diff)]
    for head, texts in _lists(diff):
        lines += ["", f"{head}:", "", *(f"- {_escaped(text)}" for text in texts)]
    for table in diff.tables:
        if table.rows:
            lines += [
                "",
                f"### {_escaped(title(table))}",
                "",
                _escaped(counts_line(table)),
                *_markdown_tables(table),
            ]
            lines += ["", *(_escaped(note) for note in notes(table))]
    return "".join(f"{line}\n" for line in lines)


def _markdown_tables(table: Table) -> list[str]:
    """Return the rows that changed, then the others folded."""
    texts = list(zip(table.rows, cells(table), strict=True))
    loud = [row for each, row in texts if each.judged.verdict not in _QUIET]
    quiet = [row for each, row in texts if each.judged.verdict in _QUIET]
    lines = ["", *_markdown_table(loud)] if loud else []
    if quiet:
        summary = f"{len(quiet)} unchanged or undecided"
        lines += ["", f"<details><summary>{summary}</summary>", "", *_markdown_table(quiet), "", "</details>"]
    return lines


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if place in _LEFT else "---:" for place in range(len(HEADS))]
    escaped = [[_escaped(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (HEADS, rule, *escaped)]


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is: no markup, no link, and nobody is mentioned."""
    plain = text.replace("@", "@\u200b")
    return _SPECIAL.sub(lambda found: "".join(f"&#{ord(character)};" for character in found[0]), plain)


def json_text(diff: Diff) -> str:
    """Return the diff as JSON."""
    return json.dumps(as_document(diff), indent=1, allow_nan=False) + "\n"


def as_document(diff: Diff) -> dict[str, Any]:
    """Return the diff, ready for JSON, the verdict first."""
    return {
        "verdict": verdict_line(diff),
        "is_regression": diff.is_regression(),
        "fail_above": diff.margin,
        "old": _source(diff.old),
        "new": _source(diff.new),
        "differs": [fact._asdict() for fact in diff.facts],
        "differs_by_run": diff.run_changes,
        "status_changes": [
            {
                "row": change.row.name,
                "old": change.old,
                "new": change.row.status,
                "error": change.error or None,
            }
            for change in diff.status_changes
        ],
        "vanished": [_only_one(one) for one in diff.vanished],
        "appeared": [_only_one(one) for one in diff.appeared],
        "metrics": [_table(table) for table in diff.tables],
    }


def _source(source: Source) -> dict[str, Any]:
    results = source.results
    return {
        "path": source.path,
        "created": results.created,
        "complete": results.complete,
        "versions": results.versions,
    }


def _only_one(one: OnlyOne) -> dict[str, Any]:
    return {"row": one.row.name, "status": one.row.status, "other_settings": one.reason or None}


def _table(table: Table) -> dict[str, Any]:
    regressions = {id(each.row) for each in table.regressions()}
    return {
        "metric": table.metric.column,
        "better": table.metric.better,
        "rows": [
            {"row": each.row.name, **asdict(each.judged), "is_regression": id(each.row) in regressions}
            for each in table.rows
        ],
    }
