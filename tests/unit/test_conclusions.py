"""Sentences of recipes, on rows whose figures are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from report_samples import grid, sample

from zerobench.report import finish_rows, summarise
from zerobench.report.conclusions import (
    CONCLUSIONS,
    ladder,
    memory_efficiency,
    next_step,
    offload_cost,
    stage_pays,
)
from zerobench.report.paces import Pace, doubt_text, pace
from zerobench.report.speed_conclusions import (
    accumulation_speed,
    compile_payback,
    compile_speed,
    precision_speed,
    run_spread,
    scaling_efficiency,
)
from zerobench.results.rows import tokens_per_step
from zerobench.results.runs import set_runs
from zerobench.results.schema import Results, Row, Run, Turns

MIB = 1 << 20
APART = "measured one after the other"


def row(strategy: str, *, ms: float, peak_mib: int = 100, **settings) -> Row:
    """Return a row of the sample with other figures."""
    found = next(found for found in sample().rows if found.strategy == strategy).model_copy(deep=True)
    found.settings = found.settings.model_copy(update=settings)
    found.step_time_ms = summarise([ms] * 8)
    found.tokens_per_s = tokens_per_step(found) / (ms / 1e3)
    found.peak_device_bytes = peak_mib * MIB
    found.name = "_".join([strategy, *(f"{key}{value}" for key, value in settings.items() if key != "model")])
    return found


def told(function: Callable[[Results], list[str]], *rows: Row) -> list[str]:
    results = sample()
    results.rows = list(rows)
    finish_rows(results)
    return function(results)


def test_precisions_are_held_against_fp32() -> None:
    results = grid()  # bf16 takes half the time of fp32 in every row
    assert precision_speed(results) == [
        f"bf16 is 2.0 times fp32 at batch 8, sequence 128 ({APART}).",
        f"bf16 is 2.0 times fp32 at batch 16, sequence 128 ({APART}).",
    ]
    assert precision_speed(sample()) == []


def test_compiled_rows_are_held_against_eager_ones() -> None:
    rows = [
        row("zero3", ms=ms * batch, compile=mode, batch_size=batch)
        for batch, mode, ms in ((8, "none", 12.0), (8, "block", 10.0), (16, "none", 12.0), (16, "block", 8.0))
    ]
    assert told(compile_speed, *rows) == [
        f"zero3 with --compile block is 1.20 to 1.50 times eager ({APART})."
    ]
    assert told(compile_speed, *rows[1::2]) == []


def test_a_ratio_below_2_does_not_round_the_gain_away() -> None:
    eager = row("zero3", ms=12.0)
    for ms, told_ratio in ((11.5, "1.04"), (11.4, "1.05"), (12.4, "0.97"), (6.1, "1.97"), (5.0, "2.4")):
        compiled = row("zero3", ms=ms, compile="block")
        assert told(compile_speed, eager, compiled) == [
            f"zero3 with --compile block is {told_ratio} times eager ({APART})."
        ]


def test_a_strategy_that_always_compiles_is_held_against_its_eager_form() -> None:
    rows = [row("zero3", ms=12.0), row("zero3", ms=8.0, compile="whole")]
    for each, strategy in zip(rows, ("deepspeed3", "deepcompile3_both"), strict=True):
        each.strategy = strategy
    assert told(compile_speed, *rows) == [
        f"deepcompile3_both with --compile whole is 1.50 times eager ({APART})."
    ]


def compiled(*, ms: float, seconds: float) -> Row:
    found = row("zero3", ms=ms, compile="block")
    found.compile_s = seconds
    return found


def test_compiling_has_paid_once_the_steps_have_saved_its_time() -> None:
    eager = row("zero3", ms=12.0)
    assert told(compile_payback, eager, compiled(ms=10.0, seconds=6.0)) == [
        "zero3 with --compile block takes 6.0 s to compile, which pays off after 3,000 steps."
    ]
    assert told(compile_payback, eager, compiled(ms=12.0, seconds=6.0)) == [
        "zero3 with --compile block takes 6.0 s to compile, which never pays off: nothing is faster than eager "
        "beyond noise."
    ]
    assert told(compile_payback, eager, row("zero3", ms=10.0, compile="block")) == []


def test_a_pace_of_rows_that_took_turns_is_that_within_rounds() -> None:
    rows = row("zero1", ms=10.0), row("zero2", ms=99.0)
    for each, windows in zip(rows, ([10.0, 20.0] * 4, [5.0, 10.0] * 4), strict=True):
        each.turns = Turns(how="in turn", group="one", steps_per_window=8, windows_ms=[windows])
    assert pace(rows[1], rows[0]) == Pace(2.0, 2.0, 2.0)


def test_a_pace_has_the_interval_of_its_medians() -> None:
    slow, fast = row("zero1", ms=10.0), row("zero2", ms=10.0)
    slow.step_time_ms = summarise([10.0, 11.0, 12.0, 13.0] * 4)
    found = pace(fast, slow)
    assert found.low is not None and found.high is not None
    assert found.low < found.value == 1.15 < found.high and found.low * found.high == pytest.approx(1.15**2)
    slow.step_time_ms = summarise([11.0, 12.0])
    assert pace(fast, slow) == Pace(1.15, caveat=APART)


@pytest.mark.parametrize(
    ("paces", "said"),
    [
        ([Pace(1.5)], ""),
        ([Pace(1.5, 1.5, 1.5)], ""),
        ([Pace(1.5, 1.4, 1.6)], " (95 % interval 1.40 to 1.60)"),
        ([Pace(1.1, 0.9, 1.3)], " (95 % interval 0.90 to 1.30, within noise)"),
        ([Pace(1.1, 0.9, 1.3), Pace(1.5, 1.4, 1.6)], " (within noise in 1 of 2 pairs)"),
        ([Pace(1.2, 1.1, 1.3), Pace(1.5, 1.4, 1.6)], ""),
        ([Pace(1.5, 1.4, 1.6, "measured so")], " (95 % interval 1.40 to 1.60; measured so)"),
        ([Pace(1.5), Pace(1.5, caveat="measured so")], " (measured so)"),
    ],
)
def test_noise_is_told_where_steps_tell_it(paces: list[Pace], said: str) -> None:
    assert doubt_text(paces) == said


def test_a_pace_says_how_rows_were_measured_that_did_not_take_turns() -> None:
    rows = row("zero1", ms=100.0, world_size=1), row("zero1", ms=100.0, world_size=2)
    assert pace(rows[1], rows[0]).caveat == APART
    rows[1].busy, rows[1].phases_ms = "other processes used 1.0 of 2 cores", None
    assert pace(rows[1], rows[0]).caveat == f"{APART} on a busy machine"
    (weak,) = told(scaling_efficiency, *rows)
    assert f"weak scaling, batch 8, {APART} on a busy machine)" in weak
    for each in rows:
        each.turns = Turns(how="in turn", group="one", steps_per_window=8, windows_ms=[[10.0] * 6])
    assert pace(rows[1], rows[0]).caveat == ""


def test_the_spread_of_runs_is_told_where_there_are_several() -> None:
    rows = row("zero1", ms=10.0, repeats=2), row("zero3", ms=10.0, repeats=2)
    for each, rates in zip(rows, ((100.0, 100.0), (90.0, 110.0)), strict=True):
        each.step_time_ms = summarise([10.0] * 2 * each.settings.num_steps)
        set_runs(each, [Run(step_time_ms=10.0, tokens_per_s=rate) for rate in rates])
    assert told(run_spread, *rows) == [
        "Over 2 runs the standard deviation of tokens/s is 0.0 to 14.1 % of the median; results.csv has it for each "
        "row."
    ]


def test_accumulation_gains_speed_and_saves_bytes() -> None:
    rows = [row("zero1", ms=10.0, grad_accum=1), row("zero1", ms=20.0, grad_accum=4)]
    for each in rows:
        each.communication_bytes = 8 * 1024 * 2
    assert told(accumulation_speed, *rows) == [
        f"zero1 with accumulation 4 has 2.0 times the speed of accumulation 1 ({APART}), with 2 bytes on the wire a "
        "token instead of 8."
    ]
    rows[0].communication_bytes = None
    assert told(accumulation_speed, *rows) == [
        f"zero1 with accumulation 4 has 2.0 times the speed of accumulation 1 ({APART})."
    ]
    assert told(accumulation_speed, rows[0]) == []


def test_offload_costs_time_and_saves_memory() -> None:
    plain = row("zero3", ms=10.0, peak_mib=100)
    moved = row("zero3", ms=25.0, peak_mib=40, offload="cpu_optimizer")
    moved.memory_bytes = {"device": {"parameters": 1}, "host": {"master": 60 * MIB}}
    assert told(offload_cost, plain, moved) == [
        f"zero3 with cpu_optimizer takes 2.5 times the step time without offload ({APART}) and saves 60.0 MiB (60 %) "
        "of the device's peak; a rank holds 60.0 MiB on the host."
    ]
    assert told(offload_cost, moved) == []
    moved.phases_ms = {"forward": 6.0, "exposed_offload": 1.0, "exposed_io": 3.0}
    (text,) = told(offload_cost, plain, moved)
    assert "of the device's peak; of a step it waits 10 % for transfers and 30 % for files; a rank" in text


def test_a_stage_begins_to_pay_where_it_saves_memory_for_little_time() -> None:
    def model(name: str, parameters: int, *, slower: float) -> list[Row]:
        size = {"model": name, "parameter_count": parameters}
        return [
            row("zero1", ms=100.0, peak_mib=100, **size),
            row("zero2", ms=100.0 * slower, peak_mib=80, **size),
        ]

    small, large = model("small", 10, slower=1.5), model("large", 20, slower=1.05)
    expected = (
        "Stage 2 begins to pay at large: it saves 20.0 MiB (20 %) of the device's peak compared with stage 1, for 5 % "
        f"more time ({APART})."
    )
    assert told(stage_pays, *large, *small) == [expected]
    assert told(stage_pays, *small) == []


def test_a_stage_pays_where_those_below_it_do_not_fit() -> None:
    below, stage = row("zero1", ms=1.0), row("zero2", ms=1.0)
    below.status = "oom"
    assert told(stage_pays, below, stage) == [
        f"Stage 2 begins to pay at {stage.settings.model}: the stages below it do not fit."
    ]


def test_the_row_that_makes_the_most_of_its_memory_is_named() -> None:
    rows = row("zero1", ms=100.0, peak_mib=100), row("zero3", ms=110.0, peak_mib=50)
    (text,) = told(memory_efficiency, *rows)
    assert text.startswith("zero3 makes the most of its memory: ")
    assert told(memory_efficiency, rows[0]) == []


def test_a_ladder_tells_what_each_step_buys_and_costs() -> None:
    rows = [
        row("ddp", ms=100.0, peak_mib=200),
        row("zero1", ms=102.0, peak_mib=150),
        row("zero2", ms=104.0, peak_mib=149),  # saves too little to be a step
        row("zero3", ms=204.0, peak_mib=75),
    ]
    assert told(ladder, *rows) == [
        f"zero1 after ddp saves 50.0 MiB (25 %) of the device's peak, for 2 % more time ({APART}).",
        f"zero3 after zero1 saves 75.0 MiB (50 %) of the device's peak, for 100 % more time ({APART}).",
    ]
    assert told(ladder, rows[0]) == []


def test_the_next_step_is_the_fastest_that_needs_notably_less() -> None:
    rows = [
        row("zero0", ms=100.0, peak_mib=200),
        row("zero1", ms=120.0, peak_mib=150),
        row("zero3", ms=150.0, peak_mib=75),
    ]
    assert told(next_step, *rows) == [
        "When memory runs out with zero0, take zero1 next: it saves 50.0 MiB (25 %) of the device's peak, for 20 % "
        f"more time ({APART})."
    ]
    assert told(next_step, *rows[:1]) == []


def test_scaling_is_told_weak_and_strong_and_where_it_ends() -> None:
    rows = [
        row("zero1", ms=100.0, world_size=1, batch_size=8),
        row("zero1", ms=200.0, world_size=2, batch_size=8),
        row("zero1", ms=62.5, world_size=2, batch_size=4),
    ]
    for each in rows:
        each.phases_ms = None
    assert told(scaling_efficiency, *rows) == [
        f"zero1 keeps 50 % of the speed per rank from 1 to 2 ranks (weak scaling, batch 8, {APART}); from 2 ranks on "
        "it keeps less than 80 %.",
        f"zero1 keeps 80 % of the speed per rank from 1 to 2 ranks (strong scaling, 1,024 tokens a step, {APART}).",
    ]
    assert told(scaling_efficiency, rows[0]) == []
    rows[1].phases_ms = {"forward": 6.0, "exposed_communication": 4.0}
    assert told(scaling_efficiency, *rows[:2]) == [
        f"zero1 keeps 50 % of the speed per rank from 1 to 2 ranks (weak scaling, batch 8, {APART}); there "
        "exposed communication is 40 % of a step; from 2 ranks on it keeps less than 80 %."
    ]


def test_sentences_on_several_workloads_name_theirs() -> None:
    rows = [
        row(strategy, ms=ms, peak_mib=peak_mib)
        for strategy, ms, peak_mib in 2 * [("zero1", 10.0, 200), ("zero3", 11.0, 100)]
    ]
    for each in rows[2:]:
        each.settings.model = "gpt2"
    model = rows[0].settings.model
    for conclusion, begin in (
        (memory_efficiency, "zero3 makes the most"),
        (ladder, "zero3 after zero1"),
        (next_step, "when memory runs out with zero1"),
    ):
        texts = told(conclusion, *rows)
        assert [text.partition(begin)[0] for text in texts] == [f"{model}: ", "gpt2: "]


def test_what_costs_no_sure_time_is_said_to_be_within_noise() -> None:
    rows = row("zero1", ms=10.0, peak_mib=200), row("zero3", ms=10.5, peak_mib=100)
    for each, first in zip(rows, (10.0, 10.5), strict=True):
        each.step_time_ms = summarise([first, first + 2, first + 4, first + 6] * 4)
    assert told(ladder, *rows) == [
        "zero3 after zero1 saves 100.0 MiB (50 %) of the device's peak, for 4 % more time (within noise)."
    ]


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_nothing_is_concluded_from_nothing(name: str) -> None:
    results = sample()
    results.rows = []
    assert CONCLUSIONS[name](results) == []
    for status in ("failed", "oom", "wrong", "skipped"):
        results = sample()
        for each in results.rows:
            each.status = status  # type: ignore[assignment]
        assert CONCLUSIONS[name](results) == []
