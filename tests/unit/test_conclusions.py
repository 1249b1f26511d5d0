"""Sentences of recipes, on rows whose figures are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from report_samples import grid, sample

from zerobench.report import finish_rows, summarise
from zerobench.report.conclusions import (
    CONCLUSIONS,
    accumulation_speed,
    compile_speed,
    ladder,
    memory_efficiency,
    next_step,
    offload_cost,
    precision_speed,
    scaling_efficiency,
    stage_pays,
)
from zerobench.results.rows import tokens_per_step
from zerobench.results.schema import Results, Row

MIB = 1 << 20


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
        "bf16 is 2.0 times fp32 at batch 8, sequence 128.",
        "bf16 is 2.0 times fp32 at batch 16, sequence 128.",
    ]
    assert precision_speed(sample()) == []


def test_compiled_rows_are_held_against_eager_ones() -> None:
    rows = [
        row("zero3", ms=ms * batch, compile=mode, batch_size=batch)
        for batch, mode, ms in ((8, "none", 12.0), (8, "block", 10.0), (16, "none", 12.0), (16, "block", 8.0))
    ]
    assert told(compile_speed, *rows) == ["zero3 with --compile block is 1.2 to 1.5 times eager."]
    assert told(compile_speed, *rows[1::2]) == []


def test_accumulation_gains_speed_and_saves_bytes() -> None:
    rows = [row("zero1", ms=10.0, grad_accum=1), row("zero1", ms=20.0, grad_accum=4)]
    for each in rows:
        each.communication_bytes = 8 * 1024 * 2
    assert told(accumulation_speed, *rows) == [
        "zero1 with accumulation 4 is 2.0 times accumulation 1, with 2 bytes on the wire a token instead of 8."
    ]
    rows[0].communication_bytes = None
    assert told(accumulation_speed, *rows) == ["zero1 with accumulation 4 is 2.0 times accumulation 1."]
    assert told(accumulation_speed, rows[0]) == []


def test_offload_costs_time_and_saves_memory() -> None:
    plain = row("zero3", ms=10.0, peak_mib=100)
    moved = row("zero3", ms=25.0, peak_mib=40, offload="cpu_optimizer")
    moved.memory_bytes = {"device": {"parameters": 1}, "host": {"master": 60 * MIB}}
    assert told(offload_cost, plain, moved) == [
        "zero3 with cpu_optimizer takes 2.5 times the step time without offload and saves 60.0 MiB (60 %) of the "
        "device's peak; a rank holds 60.0 MiB on the host."
    ]
    assert told(offload_cost, moved) == []


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
        "more time."
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
        "zero1 after ddp saves 50.0 MiB (25 %) of the device's peak, for 2 % more time.",
        "zero3 after zero1 saves 75.0 MiB (50 %) of the device's peak, for 100 % more time.",
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
        "more time."
    ]
    assert told(next_step, *rows[:1]) == []


def test_scaling_is_told_weak_and_strong_with_its_bend() -> None:
    rows = [
        row("zero1", ms=100.0, world_size=1, batch_size=8),
        row("zero1", ms=200.0, world_size=2, batch_size=8),
        row("zero1", ms=62.5, world_size=2, batch_size=4),
    ]
    assert told(scaling_efficiency, *rows) == [
        "zero1 keeps 50 % of the speed of a rank from 1 to 2 ranks (weak scaling, batch 8); it bends at 2.",
        "zero1 keeps 80 % of the speed of a rank from 1 to 2 ranks (strong scaling, 1,024 tokens a step).",
    ]
    assert told(scaling_efficiency, rows[0]) == []


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
