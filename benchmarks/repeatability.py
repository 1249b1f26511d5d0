"""Compare the ratios of rows in two runs of one comparison: `python benchmarks/repeatability.py RUN_A RUN_B`.

For every pair of rows, each run gives the ratio of their step times with its 95 % interval (docs/explain/measuring.md).
The difference of the two ratios is compared with the interval of their difference. Its half-width is the root of the
sum of the squared half-widths of both. Prints the table in Markdown, then the counts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from zerobench.results.files import read_results
from zerobench.results.rows import ratio_in_turn
from zerobench.results.schema import Results
from zerobench.results.stats import Ratio, median


class Pair(NamedTuple):
    """A pair of rows with its ratio in either run."""

    names: str
    first: Ratio
    second: Ratio

    @property
    def difference(self) -> float:
        """Difference of the ratios, as a share of the first."""
        return self.second.value / self.first.value - 1

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the difference, as a share of the ratio."""
        return math.hypot(half_width(self.first), half_width(self.second))

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.half_width


def half_width(ratio: Ratio) -> float:
    """Return half the width of a ratio's interval, as a share of the ratio."""
    if ratio.low is None or ratio.high is None:
        raise ValueError("too few rounds for an interval")
    return (ratio.high - ratio.low) / 2 / ratio.value


def pairs(first: Results, second: Results) -> Iterator[Pair]:
    """Yield all pairs of rows that took turns in both runs."""
    others = {row.name: row for row in second.rows}
    for row, other in combinations(first.rows, 2):
        if row.name not in others or other.name not in others:
            continue
        ratio = ratio_in_turn(row, other)
        again = ratio_in_turn(others[row.name], others[other.name])
        if ratio is not None and again is not None:
            yield Pair(f"{row.strategy} / {other.strategy}", ratio, again)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    found = list(pairs(read_results(sys.argv[1]), read_results(sys.argv[2])))
    if not found:
        sys.exit(
            "no two rows took turns with each other in both results: run `zerobench compare` without --rounds 0"
        )
    print("| rows | first run | second run | difference | interval of the difference | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for pair in found:
        print(
            f"| {pair.names} | {shown(pair.first)} | {shown(pair.second)} | {pair.difference:+.1%} | "
            f"± {pair.half_width:.1%} | {'inside' if pair.agrees else 'outside'} |"
        )
    widths = [half_width(ratio) for pair in found for ratio in (pair.first, pair.second)]
    print(
        f"\n{sum(pair.agrees for pair in found)} of {len(found)} differences are inside; the median half-width of a "
        f"ratio's interval is {median(widths):.1%}."
    )


def shown(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


if __name__ == "__main__":
    main()
