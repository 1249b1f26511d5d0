"""Pairs of results that the tests of `zerobench diff` begin with.

Run this file as a program to write the golden texts anew after a wanted change, then read the difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from report_samples import GOLDEN, sample

from zerobench.bench.assess import apply_turns
from zerobench.diff.differences import Diff, Source, diff
from zerobench.diff.show import markdown_text, table_text
from zerobench.report import finish_rows
from zerobench.results.schema import Results, Row, Turns

MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Standard deviations of what moves times though nothing changed, as shares of the time."""

    of_file: float
    of_run: float
    of_window: float

    def runs_ms(self, draw: random.Random, step_ms: float, *, run_num: int) -> list[list[float]]:
        """Return 15 windows of each run of a row, in one file."""
        file_ms = step_ms * (1 + draw.gauss(0, self.of_file))
        found = []
        for _ in range(run_num):
            run_ms = file_ms * (1 + draw.gauss(0, self.of_run))
            found.append([run_ms * (1 + draw.gauss(0, self.of_window)) for _ in range(15)])
        return found


# 95 % of the ratios of two files lie within the 1 % that the intervals of runs allow for. A machine that drifts more
# between files has more false changes: docs/explain/telling-changes-apart.md.
ORDINARY = Machine(of_file=0.0036, of_run=0.007, of_window=0.03)
QUIET = Machine(of_file=0.002, of_run=0.004, of_window=0.008)


def turned(row: Row, runs_ms: Sequence[Sequence[float]]) -> None:
    windows = [list(run) for run in runs_ms]
    apply_turns(row, Turns(how="in turn", group="workload 1", steps_per_window=10, windows_ms=windows))


def measured_results(
    seed: int,
    *,
    machine: Machine = ORDINARY,
    run_num: int = 1,
    slower: Callable[[int], float] = lambda _: 1.0,
) -> Results:
    """Return 20 rows that a machine measured; row ``index`` takes ``slower(index)`` times as long."""
    draw, results = random.Random(seed), sample()
    rows = []
    for index in range(20):
        row = results.rows[index % len(results.rows)].model_copy(deep=True)
        row.name, row.settings.batch_size = f"{row.name}_{index}", 8 + index
        turned(row, machine.runs_ms(draw, (100.0 + index) * slower(index), run_num=run_num))
        rows.append(row)
    results.rows = rows
    finish_rows(results)
    return results


def difference(old: Results, new: Results, **options) -> Diff:
    return diff(Source("base", old), Source("now", new), **{"margin": MARGIN, **options})


def changed_pair() -> tuple[Results, Results]:
    """Return results with every kind of change: times, statuses, rows, settings, versions, machine, communicator."""
    old, new = sample(), sample()
    for results, factors in ((old, (1.0,) * 7), (new, (1.0, 1.1, 0.9, 1.01, 1.0, 1.0, 1.0))):
        draw = random.Random(len(results.versions))
        for row, factor in zip(results.rows, factors, strict=True):
            assert row.step_time_ms is not None
            turned(row, QUIET.runs_ms(draw, row.step_time_ms.median * factor, run_num=3))
    by_strategy = {row.strategy: row for row in new.rows}
    zero1, zero3, ddp, fsdp2 = (by_strategy[name] for name in ("zero1", "zero3", "ddp", "fsdp2"))
    zero1.settings.communicator = "c10d"
    zero3.status, zero3.error = "oom", "rank 1 asked for 12.4 GiB of exp_avg and 7.9 GiB were free"
    ddp.settings.batch_size = 16
    fsdp2.name, fsdp2.strategy = "fsdp2_keep_bf16_ranks2_bs8_sl128", "fsdp2_keep"
    assert zero1.peak_device_bytes is not None
    zero1.peak_device_bytes = int(1.2 * zero1.peak_device_bytes)
    new.versions["torch"] = "2.14.0"
    new.machine["cpu"] = "Another CPU"
    new.complete = False
    return old, new


GOLDEN_DIFFS = {
    "diff_changed.txt": table_text,
    "diff_changed.md": markdown_text,
}


if __name__ == "__main__":
    for golden_name, write in GOLDEN_DIFFS.items():
        (GOLDEN / golden_name).write_text(write(difference(*changed_pair())), encoding="utf-8")
