"""A setting and a strategy that a line of the table and a row of the catalogue made."""

from __future__ import annotations

import shlex

from plan_samples import SMALL, configuration, names

from zerobench import strategies
from zerobench.bench.jobs import reference_values
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan


def test_rest_spans_the_grid_and_names_rows() -> None:
    assert names(rest_ms=(0, 5), strategies=("zero1",)) == [
        "zs1_fp32_ranks2_bs4_sl64",
        "zs1_fp32_ranks2_bs4_sl64_rest5",
    ]


def test_rest_is_part_of_the_command_that_runs_the_row_again() -> None:
    options = CompareOptions(**SMALL, rest_ms=(5,))
    words = shlex.split(rerun_command(make_plan(options).configurations[0], options))
    assert words[words.index("--rest-ms") + 1] == "5"


def test_rest_changes_no_result() -> None:
    rested, hurried = configuration(rest_ms=(5,)), configuration()
    assert rested.reference_group() == hurried.reference_group() and reference_values()["rest_ms"] == 0


def test_the_strategy_is_there() -> None:
    assert strategies.get("ddp_unbucketed").name == "ddp_unbucketed"
