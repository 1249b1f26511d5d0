"""Arithmetic of pipelines, and rows that plans make of their options."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from builders import make_settings, make_window
from plan_samples import configuration, names
from torch.distributed.pipelining import ScheduleGPipe

from zerobench import strategies
from zerobench.bench.assess import apply_windows, first_row
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.errors import ConfigError
from zerobench.strategies.pipeline_stage import ScheduleClock, TimedStage
from zerobench.strategies.pipelining import bubble_share, cut_layers, why_impossible


def why(**fields):
    defaults = {"pipeline_stages": 2, "pipeline_schedule": "1f1b", "micro_batches": 4, "grad_accum": 2}
    return why_impossible(make_settings(**{"world_size": 4, **defaults, **fields}))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_pipeline_that_divides_is_possible(schedule):
    assert why(pipeline_schedule=schedule) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"compile": "whole"}, "cannot be compiled whole: use --compile block"),
        ({"pipeline_stages": 1}, "--pipeline-stages 1 is not a pipeline: use 2 or more"),
        ({"pipeline_stages": 3}, "4 ranks do not divide into pipelines of 3 stages"),
        (
            {"micro_batches": 3},
            "the 8 sequences of a pipeline's step .* do not divide into --micro-batches 3",
        ),
        ({"micro_batches": 1}, "--micro-batches 1 do not fill 2 stages: use 2 or more"),
        (
            {"pipeline_stages": 4, "pipeline_schedule": "interleaved", "micro_batches": 10, "batch_size": 5},
            None,
        ),
        (
            {"pipeline_stages": 4, "pipeline_schedule": "interleaved", "micro_batches": 9, "batch_size": 9},
            "runs 9 micro-batches in 2 rounds, which do not divide them: use a multiple of 4",
        ),
    ],
)
def test_what_a_pipeline_cannot_run_has_a_reason(fields, reason):
    found = why(**fields)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ConfigError, match=reason):
            raise ConfigError(found)


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "share"),
    [("gpipe", 2, 4, 1 / 5), ("1f1b", 4, 4, 3 / 7), ("interleaved", 2, 4, 1 / 9), ("1f1b", 1, 4, 0)],
)
def test_the_bubble_by_the_formula(schedule, stages, micro_batches, share):
    assert bubble_share(schedule, stages=stages, micro_batches=micro_batches) == pytest.approx(share)


@pytest.mark.parametrize(
    ("layers", "parts", "head", "sizes"),
    [
        (4, 2, 0.3, [2, 2]),
        (12, 2, 8.2, [10, 2]),  # gpt-64m
        (12, 4, 8.2, [4, 4, 3, 1]),
        (5, 4, 0.0, [2, 1, 1, 1]),
        (2, 2, 50.0, [1, 1]),
    ],
)
def test_the_slowest_part_is_as_fast_as_can_be(layers, parts, head, sizes):
    found = cut_layers(layers, parts, head_layers=head)
    assert [len(part) for part in found] == sizes
    assert [layer for part in found for layer in part] == list(range(layers))


def settings_of(**asked):
    plan = make_plan(CompareOptions(data="synthetic", strategies=("zero0", "pipeline"), **asked))
    return {one.strategy: one.settings for one in plan.configurations}


def test_micro_batches_are_those_of_other_rows_unless_asked_for():
    rows = settings_of(grad_accum=(3,))
    assert rows["pipeline"].micro_batches == 2 * 3
    assert settings_of(micro_batches=(4,))["pipeline"].micro_batches == 4


def test_only_pipelines_have_their_settings():
    row = settings_of()["zero0"]
    assert (row.pipeline_stages, row.pipeline_schedule, row.micro_batches) == (None, None, None)


def test_schedules_are_compared():
    found = names(strategies=("zero0", "pipeline"), pipeline_schedule=("gpipe", "interleaved"))
    assert found == [
        "zs0_fp32_ranks2_bs4_sl64",
        "pipeline_fp32_ranks2_bs4_sl64_pp2_gpipe_mb2",
        "pipeline_fp32_ranks2_bs4_sl64_pp2_interleaved_mb2",
    ]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"pipeline_schedule": ("zb",)}, "unknown --pipeline-schedule 'zb': use one of gpipe, 1f1b, interl"),
        ({"pipeline_stages": (0,)}, "--pipeline-stages 0 is not valid"),
    ],
)
def test_options_that_cannot_be_are_refused(asked, error):
    with pytest.raises(ConfigError, match=error):
        settings_of(**asked)


def test_an_option_of_pipelines_needs_one():
    with pytest.raises(ConfigError, match="--micro-batches 4 has no effect"):
        names(strategies=("zero0",), micro_batches=(4,), given=frozenset({"--micro-batches"}))


def test_the_bubble_is_that_of_all_ranks_against_the_longest_schedule():
    one = configuration(strategies=("pipeline",), micro_batches=(4,))
    row = first_row(one, status="ok")
    apply_windows(
        row,
        [
            make_window(schedule_busy_ms=80.0, schedule_ms=100.0),
            make_window(schedule_busy_ms=70.0, schedule_ms=85.0),
        ],
    )
    assert row.bubble_pct == pytest.approx(25.0)
    assert row.bubble_formula_pct == pytest.approx(20.0)


@pytest.mark.parametrize("asked", [{"offload": "cpu_optimizer"}, {"optimizer_in_backward": True}])
def test_state_stays_on_its_device(asked):
    assert strategies.get("pipeline").unplaced(make_settings(**asked)) is not None


class TakesTooMuch(torch.autograd.Function):
    """Memory runs out in forward, or in backward."""

    @staticmethod
    def forward(ctx, x, phase):
        ctx.phase = phase
        if phase == "forward":
            raise MemoryError("no room")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("no room")


class Layer(torch.nn.Module):
    def __init__(self, phase):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.phase = phase

    def forward(self, x):
        return TakesTooMuch.apply(x * self.weight, self.phase)


@pytest.fixture
def group_of_one(own_process_group) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_memory_that_ran_out_in_a_stage_is_known_as_that(group_of_one, phase):
    device = torch.device("cpu")
    of_stage = {"input_args": torch.zeros(2), "output_args": torch.zeros(2), "clock": ScheduleClock(device)}
    stage = TimedStage(Layer(phase), 0, 1, device, **of_stage)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=lambda output, target: output.sum())
    with pytest.raises(MemoryError, match="no room"):
        schedule.step(torch.zeros(2), target=torch.zeros(2))
