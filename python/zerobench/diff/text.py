"""A diff as sentences and cells that the table and Markdown share."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.diff.differences import Diff, OnlyOne, Source, StatusChange, Table
from zerobench.diff.judge import (
    ALLOWED_ALONE,
    ALLOWED_IN_TURN,
    ALLOWED_RUNS,
    BUSY,
    CANNOT_TELL,
    ONE_VALUE,
    Judged,
)
from zerobench.diff.metrics import Repeats
from zerobench.report.column import ABSENT, decimals_for
from zerobench.results.sizes import join_words, memory_unit

HEADS = ("row", "old", "new", "new/old", "95 % interval", "verdict", "rests on")
SHOWN_FACTS = 8
_OF_A_MACHINE = ("cpu", "cores", "gpus", "details.host")
_FEWEST_TOGETHER = 4  # rows; by chance alone fewer often go one way
_LONGEST = 160
_FEWEST_DECIMAL = 0.01  # smaller figures are written with an exponent


def verdict_line(diff: Diff) -> str:
    """Return the first line: what broke and what is worse by more than the margin, then what nobody can tell."""
    limit = share_text(diff.margin)
    broken = sum(change.is_broken for change in diff.status_changes)
    parts = [f"{_rows_text(broken)} broke"] if broken else []
    for table in diff.tables:
        found = table.regressions()
        if found:
            words = join_words(list(dict.fromkeys(each.judged.verdict for each in found)))
            parts.append(f"{table.metric.column}: {_rows_text(len(found))} {words} by more than {limit}")
    unsure = [f"{_rows_text(len(diff.vanished))} gone"] if diff.vanished else []
    for table in diff.tables:
        num = table.counts().get(CANNOT_TELL, 0)
        unsure += [f"{table.metric.column}: {num} of {_rows_text(diff.ok_num)} cannot tell"] if num else []
    head = f"regression: {'; '.join(parts)}" if parts else f"no regression above {limit} found"
    return "; ".join([head, *unsure])


def counts_line(table: Table) -> str:
    """Return such as "1 slower, 17 same within noise"."""
    return ", ".join(f"{num} {verdict}" for verdict, num in table.counts().items())


def source_lines(diff: Diff) -> list[str]:
    """Return where the files are from and what differs besides the rows."""
    lines = [_source_text("old", diff.old), _source_text("new", diff.new)]
    lines += [
        f"differs: {clean(fact.key)} {_short(fact.old)} -> {_short(fact.new)}"
        for fact in diff.facts[:SHOWN_FACTS]
    ]
    if len(diff.facts) > SHOWN_FACTS:
        lines.append(f"differs: {len(diff.facts) - SHOWN_FACTS} more facts of the machine (--format json)")
    lines += [f"differs: {clean(text)} ({_rows_text(num)})" for text, num in diff.run_changes.items()]
    if any(fact.key in _OF_A_MACHINE for fact in diff.facts):
        lines.append("warning: the files are of different machines, so a change may be the machine's")
    return lines


def _source_text(word: str, source: Source) -> str:
    cut_short = "" if source.results.complete else ", incomplete: rows are missing"
    return f"{word}: {clean(source.path)}, {clean(source.results.created)}{cut_short}"


def _short(value: object) -> str:
    return "nothing" if value is None else clean(str(value), longest=60)


def status_text(change: StatusChange) -> str:
    """Return such as "ok -> oom (rank 1 asked for 12 GiB)"."""
    error = f" ({clean(change.error)})" if change.error and change.row.status != "ok" else ""
    return f"{change.old} -> {change.row.status}{error}"


def only_one_text(found: OnlyOne) -> str:
    """Return the row's name and status, and the settings in which its namesake differs."""
    reason = f"; other settings: {clean(found.reason)}" if found.reason else ""
    return f"{clean(found.row.name)} ({found.row.status}{reason})"


def title(table: Table) -> str:
    """Return the column with its unit and direction."""
    unit, _ = _unit(table)
    better = f"{table.metric.better} is better" if table.metric.better else "neither direction is better"
    return f"{table.metric.column}{f' in {unit}' if unit else ''}, {better}"


def cells(table: Table) -> list[list[str]]:
    """Return the texts of each row, in the order of HEADS."""
    _, scale = _unit(table)
    values = [
        value for each in table.rows for value in (each.judged.old, each.judged.new) if value is not None
    ]
    decimals = decimals_for([abs(value) / scale for value in values])
    lines = []
    for each in table.rows:
        judged = each.judged
        old, new = (_value_text(value, scale, decimals) for value in (judged.old, judged.new))
        ratio = ABSENT if judged.ratio is None else _ratio_text(judged.ratio)
        lines.append(
            [clean(each.row.name), old, new, ratio, interval_text(judged), judged.verdict, judged.rests_on]
        )
    return lines


def _unit(table: Table) -> tuple[str, int]:
    if "bytes" in table.metric.column:
        return memory_unit(int(each.judged.new) for each in table.rows if each.judged.new is not None)
    return ("ms" if "_ms" in table.metric.column else ""), 1


def _value_text(value: float | None, scale: int, decimals: int) -> str:
    if value is None:
        return ABSENT
    scaled = value / scale
    if scaled and (abs(scaled) < _FEWEST_DECIMAL or abs(scaled) >= 1e9):
        return f"{scaled:.3g}"
    return f"{scaled:,.{decimals}f}"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 1000 else f"{ratio:.3g}"


def interval_text(judged: Judged) -> str:
    if judged.low is None or judged.high is None:
        return ABSENT
    return f"{_ratio_text(judged.low)} to {_ratio_text(judged.high)}"


def notes(table: Table) -> list[str]:
    """Return what to know of the intervals of a column, by what the rows rest on."""
    bases = {each.judged.rests_on for each in table.rows}
    found = [text for ending, text in _NOTES.items() if any(basis.endswith(ending) for basis in bases)]
    ratios = [each.judged.ratio for each in table.rows if each.judged.ratio is not None]
    if _moved_together(table, ratios):
        span = f"{_ratio_text(min(ratios))} to {_ratio_text(max(ratios))}"
        found.append(
            f"All {len(ratios)} rows moved the same way ({span}): the machine may have changed, or something that all "
            "rows use."
        )
    return found


def _moved_together(table: Table, ratios: Sequence[float]) -> bool:
    """Return whether times of enough rows went one way, and some by more than noise."""
    are_times = table.metric.repeats is Repeats.AS_TIMES
    is_one_way = all(ratio > 1 for ratio in ratios) or all(ratio < 1 for ratio in ratios)
    is_changed = any(each.judged.is_worse or each.judged.is_better for each in table.rows)
    return are_times and len(ratios) >= _FEWEST_TOGETHER and is_one_way and is_changed


def share_text(share: float) -> str:
    return f"{100 * share:g} %"


def _rows_text(num: int) -> str:
    return f"{num} row{'s' if num != 1 else ''}"


def clean(text: str, *, longest: int = _LONGEST) -> str:
    """Return a text of a file as one line: nothing in it moves the cursor, and it ends after ``longest`` characters."""
    line = "".join(character if character.isprintable() else " " for character in text[: longest + 1])
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def status_lines(changes: Sequence[StatusChange]) -> list[str]:
    return [f"{clean(change.row.name)}: {status_text(change)}" for change in changes]


_NOTES = {
    " runs": "Intervals of runs hold the spread of their medians, and "
    f"{share_text(ALLOWED_RUNS)} for what changes from file to file.",
    " windows": f"One run each: a difference within {share_text(ALLOWED_IN_TURN)} may come from the machine, or a "
    "larger one where windows spread widely. To tell smaller differences, measure both files with --repeats 3.",
    " steps": "Rows measured alone saw one moment of the machine: only differences above "
    f"{share_text(ALLOWED_ALONE)} are reported. Measure with --rounds or --repeats 3.",
    ONE_VALUE: "Each file has one value, so its error is unknown.",
    BUSY: "Other programs disturbed the rows that were measured on a busy machine: measure them again.",
}
"""Sentences below a table, by the end of what a row rests on."""
