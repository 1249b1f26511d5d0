"""Holds rules of thumb of the field against the results in this folder, and writes docs/explain/claims.md:

    python benchmarks/claims.py

Results are every results.json below benchmarks/ and the tables of its pages that have a row (or mode), a step time and,
where memory matters, a peak. Only rows on GPUs confirm or contradict a claim about GPUs.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from claim_rows import (
    ROOT,
    Measured,
    Pair,
    freed_pct,
    little_used,
    measured_rows,
    nothing,
    slower_pct,
    stages,
    tier,
    times,
)

from zerobench.recipes.references import Reference, read_references
from zerobench.results.files import write_atomically
from zerobench.results.sizes import GIB
from zerobench.results.stats import median

PAGE = ROOT / "docs/explain/claims.md"
NOISE_PCT = 2.0
WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A rule of thumb, with the published figures that bound it."""

    reference: str
    """Identifier in references.csv."""
    text: str
    """The claim, with ``{low}`` and ``{high}``."""
    pairs: Callable[[Sequence[Measured]], list[Pair]]
    measure: Callable[[Measured, Measured], float | None] = slower_pct
    low: str | float | None = None
    """The published figure that it is at least, or a number; None: no lower bound."""
    high: str | float | None = None
    unit: str = "%"

    def bounds(self, references: Sequence[Reference]) -> tuple[float | None, float | None]:
        def value(bound: str | float | None) -> float | None:
            if not isinstance(bound, str):
                return bound
            (found,) = [one.value for one in references if (one.id, one.figure) == (self.reference, bound)]
            return found

        return value(self.low), value(self.high)


def _slower(offload: str) -> Claim:
    return Claim(
        reference=f"rule-{offload}",
        text=f"`{offload}` is {{low}} to {{high}} % slower",
        pairs=tier(offload),
        low="slower, low",
        high="slower, high",
    )


def _freed(offload: str) -> Claim:
    return Claim(
        reference=f"rule-{offload}",
        text=f"`{offload}` frees {{low}} to {{high}} % of the GPU's memory",
        pairs=tier(offload),
        measure=freed_pct,
        low="GPU memory freed, low",
        high="GPU memory freed, high",
    )


def _host(offload: str) -> Claim:
    return Claim(
        reference=f"rule-{offload}",
        text=f"`{offload}` needs {{low}} to {{high}} times the GPU's memory on the host",
        pairs=nothing,
        low="host memory over GPU memory, low",
        high="host memory over GPU memory, high",
    )


CLAIMS = (
    Claim(
        reference="rule-zero1",
        text="Stage 1 is at most {high} % slower than stage 0",
        pairs=stages(0, 1),
        high="slower than stage 0, at most",
    ),
    Claim(
        reference="rule-zero2",
        text="Stage 2 is {low} to {high} % slower than stage 1",
        pairs=stages(1, 2),
        low="slower than stage 1, low",
        high="slower than stage 1, high",
    ),
    Claim(
        reference="rule-zero3",
        text="Stage 3 is {low} to {high} % slower than stage 2",
        pairs=stages(2, 3),
        low="slower than stage 2, low",
        high="slower than stage 2, high",
    ),
    Claim(
        reference="a100-gpt2-zero3",
        text="On one GPU, stage 3 saves memory compared with stage 0",
        pairs=stages(0, 3, one_rank=True),
        measure=freed_pct,
        low=NOISE_PCT,
    ),
    Claim(
        reference="a100-gpt2-zero3",
        text="On one GPU, stage 3 is slower than stage 0",
        pairs=stages(0, 3, one_rank=True),
        low=NOISE_PCT,
    ),
    _slower("cpu_optimizer"),
    _freed("cpu_optimizer"),
    _host("cpu_optimizer"),
    _slower("cpu_full"),
    _freed("cpu_full"),
    _host("cpu_full"),
    Claim(
        reference="rule-nvme",
        text="`nvme` takes {low} to {high} times as long",
        pairs=tier("nvme"),
        measure=times,
        low="slower, low",
        high="slower, high",
        unit="times",
    ),
    Claim(
        reference="rule-zero0-1",
        text="Stage 0 or 1 is the fastest where it takes up to 60 % of the GPU's memory",
        pairs=little_used(0.6),
        high=NOISE_PCT,
    ),
    Claim(
        reference="rule-zero2",
        text="Stage 2 is the one to take where memory is {low} to {high} % full",
        pairs=nothing,
        low="memory occupancy to choose it, low",
        high="memory occupancy to choose it, high",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim, next to what the results show."""

    claim: Claim
    text: str
    reference: Reference
    values: list[tuple[float, Pair]]
    verdict: str


def judge(claim: Claim, rows: Sequence[Measured], references: Sequence[Reference]) -> Judgement:
    """Return what the rows on GPUs show: the claim holds if the median of the pairs lies within its bounds."""
    low, high = claim.bounds(references)
    pairs = [pair for pair in claim.pairs(rows) if pair[0].on_gpu]
    values = [(value, pair) for pair in pairs if (value := claim.measure(*pair)) is not None]
    verdict = "not tested here"
    if values:
        middle = median([value for value, _ in values])
        inside = (low is None or middle >= low) and (high is None or middle <= high)
        verdict = "confirmed" if inside else "contradicted"
    return Judgement(
        claim=claim,
        text=claim.text.format(low=_plain(low), high=_plain(high)),
        reference=next(one for one in references if one.id == claim.reference),
        values=values,
        verdict=verdict,
    )


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def claims_page(rows: Sequence[Measured]) -> str:
    references = read_references()
    found = [judge(claim, rows, references) for claim in CLAIMS]
    study = found[0].reference.study
    source = found[0].reference.source
    intro = (
        f"Rules of thumb of the study {study} ({source}), each next to what the results in this repository show. The "
        "median over pairs of rows on GPUs confirms or contradicts a claim. The rows of a pair were measured in one "
        "table or file and differ in nothing else."
    )
    lines = [
        "# Rules of thumb, and what was measured",
        "",
        "<!-- Generated by `python benchmarks/claims.py`. -->",
        "",
        textwrap.fill(intro, WIDTH, break_on_hyphens=False),
        "",
        "| claim | here: median (range) | pairs | verdict |",
        "| --- | --- | --: | --- |",
        *map(_table_line, found),
        "",
        "All rows are from one host with fast links, and most of them are bound by compute or by their host.",
        "Slower links cost the higher stages more.",
        "",
        "## Rows behind the figures",
    ]
    for judgement in found:
        lines += _evidence(judgement)
    return "\n".join(lines) + "\n"


def _table_line(found: Judgement) -> str:
    shown = "" if not found.values else _range_text([value for value, _ in found.values], found.claim.unit)
    return f"| {found.text} | {shown} | {len(found.values)} | **{found.verdict}** |"


def _range_text(values: Sequence[float], unit: str) -> str:
    middle, low, high = map(_rounded, (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high}) {unit}" if len(values) > 1 else f"{middle} {unit}"


def _rounded(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # no minus before zero


def _evidence(found: Judgement) -> list[str]:
    if not found.values:
        return []
    lines = ["", f"### {found.text.replace('`', '')}", ""]
    for value, (row, other) in found.values:
        lines.append(
            f"- `{row.source}`: {_row_text(row)}, compared with {_row_text(other)}: {_rounded(value)} "
            f"{found.claim.unit}"
        )
    return lines


def _row_text(row: Measured) -> str:
    peak = "" if row.peak_bytes is None else f", {row.peak_bytes / GIB:.1f} GiB"
    return f"{row.name} ({row.ms:.1f} ms{peak})"


def main() -> int:
    write_atomically(PAGE, claims_page(measured_rows()).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
