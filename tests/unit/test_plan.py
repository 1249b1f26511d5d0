"""The grid, its names, and every refusal before work begins."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from plan_samples import ON_GPUS, SMALL, configuration, names
from typer.testing import CliRunner

from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.cli import main as cli
from zerobench.errors import ConfigError, DataError, Error


def test_names_tell_what_a_row_is() -> None:
    assert names(strategies=("single", "zero0", "ddp", "fsdp2")) == [
        "single_fp32_ranks1_bs4_sl64",
        "zs0_fp32_ranks2_bs4_sl64",
        "ddp_fp32_ranks2_bs4_sl64",
        "fsdp2_fp32_ranks2_bs4_sl64",
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"grad_accum": (4,)}, "zs0_fp32_ranks2_bs4_sl64_ga4"),
        ({"clip": (1.0,)}, "zs0_fp32_ranks2_bs4_sl64_clip1"),
        ({"clip": (0.5,), "checkpointing": True}, "zs0_fp32_ranks2_bs4_sl64_clip0.5_ckpt"),
        ({"precision": ("bf16",), "world_size": (3,)}, "zs0_bf16_ranks3_bs4_sl64"),
        ({"offload": ("cpu_optimizer",)}, "zs0_fp32_ranks2_bs4_sl64_offload-cpu_optimizer"),
        (
            {"offload": ("cpu_full",), "offload_ratio": (0.25,), "optimizer_in_backward": (True,)},
            "zs0_fp32_ranks2_bs4_sl64_offload-cpu_full_ratio0.25_inbackward",
        ),
    ],
)
def test_settings_that_are_not_the_default_are_in_the_name(options, name) -> None:
    assert names(**options)[0] == name


def test_the_grid_holds_every_combination_once_under_names_of_their_own() -> None:
    found = names(
        model=("tiny", "gpt2"),
        strategies=("single", "zero0", "zero3"),
        world_size=(2, 4),
        batch_size=(4, 8),
        clip=(None, 1.0),
    )
    # Per model, batch and clip: single once, two stages at two world sizes.
    assert len(found) == 2 * 2 * 2 * (1 + 2 * 2)
    assert len(set(found)) == len(found)


def test_world_size_changes_nothing_for_single() -> None:
    rows = make_plan(
        CompareOptions(**{**SMALL, "strategies": ("single", "ddp"), "world_size": (2, 3)})
    ).configurations
    assert [row.settings.world_size for row in rows if row.strategy == "single"] == [1]


@pytest.mark.parametrize("on", [{}, ON_GPUS])
def test_the_floor_has_the_ranks_of_the_rows_above_it(on) -> None:
    chosen = {**SMALL, **on, "strategies": ("compute_only", "zero0"), "world_size": (2, 3)}
    rows = make_plan(CompareOptions(**chosen)).configurations
    assert [row.settings.world_size for row in rows if row.strategy == "compute_only"] == [2, 3]


def test_settings_are_resolved() -> None:
    row = make_plan(CompareOptions(**{**SMALL, "num_layers": (2,)})).configurations[0]
    assert row.settings.model_config_resolved["num_layers"] == 2
    assert row.settings.parameter_count is not None and row.settings.parameter_count > 100_000
    assert row.settings.optimizer["beta1"] == 0.9
    assert row.stage == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": ("tinny",)}, "'tiny'"),
        ({"model_option": {"num_layer": 2}}, "'num_layers'"),
        (
            {"model_option": {"num_layers": 2}, "num_layers": (2, 3)},
            "--num-layers and --model-option num_layers",
        ),
        ({"model_option": {"dropout": 0.1}, "dropout": 0.2}, "--dropout and --model-option dropout"),
        ({"strategies": ("zero_3",)}, "'zero3'"),
        ({"strategies": ("no.such.module:Class",)}, "no module named"),
        ({"strategies": ("zerobench.strategies.base:Nothing",)}, "'Nothing'"),
        ({"precision": ("fp8",)}, "fp32"),
        ({"compile": ("all",)}, "none, block, whole"),
        ({"attention": "flash"}, "flash_attention_2"),
        ({"attention": "eager"}, "hf:gpt2"),
        ({"dropout": 1.5}, "dropout"),
        ({"tf32": True}, "--tf32"),
        ({"verify_layers": 0}, "--verify-layers 0"),
        ({"batch_size": (4, 0)}, "--batch-size 0"),
        ({"seq_length": (0,)}, "--seq-length 0"),
        ({"grad_accum": (-1,)}, "--grad-accum -1"),
        ({"world_size": (0,)}, "--world-size 0"),
        ({"num_steps": 0}, "--num-steps 0"),
        ({"warmup_steps": -1}, "--warmup-steps -1"),
        ({"rounds": -1}, "--rounds -1"),
        ({"repeats": 0}, "--repeats 0"),
        ({"timeout_s": 0}, "--timeout 0"),
        ({"timeout_s": 0.0001}, "--timeout 0.0001 is not valid: use 0.001 to 1000000 seconds"),
        ({"timeout_s": 1e10}, "--timeout 1e+10 is not valid: use 0.001 to 1000000 seconds"),
        ({"clip": (0.0,)}, "--clip 0"),
        ({"clip": (float("nan"),)}, "--clip nan"),
        ({"lr": -1.0}, "--lr -1"),
        ({"rank_memory_gib": 0.0}, "--rank-memory-gib 0"),
        ({"rank_memory_gib": float("inf")}, "--rank-memory-gib inf"),
        ({"seed": 1 << 64}, "--seed 18446744073709551616"),
        ({"seq_length": (100_000,)}, "max_seq_length"),
        ({"hidden_size": (65,)}, "num_heads"),
        ({"strategies": ()}, "at least one strategy"),
        ({"offload": ("gpu",)}, "none, cpu_optimizer, cpu_full, nvme"),
        ({"offload": ("cpu_full",), "offload_ratio": (1.5,)}, "--offload-ratio 1.5"),
        ({"offload_ratio": (0.5,)}, "add --offload"),
        ({"host_memory_gib": 1.0}, "add --offload"),
        ({"offload": ("cpu_full",), "host_memory_gib": -1.0}, "--host-memory-gib -1"),
        ({"device_memory_gib": 0.0}, "--device-memory-gib 0"),
        ({"bind": "cores"}, "none, numa"),
        ({"offload": ("nvme",)}, "add --nvme-path"),
        ({"nvme_paths": (Path("/"),)}, "add --offload nvme"),
        ({"offload": ("nvme",), "nvme_paths": (Path("/no/such/folder"),)}, "No such file"),
        ({"offload": ("nvme",), "nvme_paths": (Path("/proc"),)}, "--nvme-path /proc"),
        ({"baseline": "dpp"}, "'ddp'"),
        ({"data": "/no/such/file"}, "no such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options, said) -> None:
    with pytest.raises(Error) as caught:
        make_plan(CompareOptions(**{**SMALL, **options}))
    assert isinstance(caught.value, ConfigError | DataError)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_that_cannot_serve_is_refused(tmp_path) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.touch()
    short.write_text("a few bytes")
    for path in (empty, short):
        with pytest.raises(DataError, match=path.name):
            make_plan(CompareOptions(**{**SMALL, "data": str(path)}))


def test_given_ranks_decide_the_world_size() -> None:
    options = CompareOptions(**{**SMALL, "world_size": (4,)})
    assert make_plan(options, given_world_size=4).configurations[0].settings.world_size == 4
    with pytest.raises(ConfigError, match="remove it"):
        make_plan(options, given_world_size=2)


def test_more_ranks_than_cores_is_a_warning() -> None:
    plan = make_plan(CompareOptions(**{**SMALL, "world_size": (4096,)}))
    assert "4096 ranks share" in plan.warnings[0]
    given = CompareOptions(**{**SMALL, "world_size": (4096,)}, host_ranks=2048)
    assert "2048 ranks share" in make_plan(given).warnings[0]
    apart = CompareOptions(**{**SMALL, "world_size": (4096,)}, host_ranks=2048, core_ranks=1)
    assert not make_plan(apart).warnings


def test_communicators_are_an_axis_of_our_rows() -> None:
    options = {**SMALL, "strategies": ("zero2", "ddp"), "communicator": ("auto", "c10d")}
    configurations = make_plan(CompareOptions(**options)).configurations
    assert [(one.strategy, one.options) for one in configurations] == [
        ("zero2", {}),
        ("ddp", {}),
        ("zero2", {"communicator": "c10d"}),
    ]
    first, _, second = configurations
    assert second.name == f"{first.name}_c10d"
    assert first.checksum_group() != second.checksum_group()
    assert "--communicator c10d" in rerun_command(second, CompareOptions(**options))
    assert "--communicator" not in rerun_command(first, CompareOptions(**options))
    with pytest.raises(ConfigError, match="unknown --communicator on cpu 'peer'"):
        make_plan(CompareOptions(**{**options, "communicator": ("peer",)}))


def test_the_rerun_command_gives_the_same_row(tmp_path) -> None:
    row = configuration(
        model=("gpt2",), num_layers=(2,), model_option={"tied_embeddings": False}, strategies=("zero2",),
        world_size=(3,), grad_accum=(2,), clip=(0.5,), precision=("bf16",), seed=7, num_steps=3, warmup_steps=1,
        checkpointing=True, lr=0.01, compile=("block",), dropout=0.1, offload=("nvme",),
        offload_ratio=("auto",), nvme_paths=(tmp_path, tmp_path / ".."), host_memory_gib=1.5, device_memory_gib=40.0,
        bind="numa", optimizer_in_backward=(True,),
    )  # fmt: skip
    words = shlex.split(rerun_command(row, CompareOptions(lr=0.01, verify_layers=1)))
    assert words[1:4] == ["-m", "zerobench", "compare"]
    given = dict(pairwise(words))
    assert [given[key] for key in ("--strategies", "--world-size", "--grad-accum", "--clip", "--seed", "--lr")] == [
        "zero2", "3", "2", "0.5", "7", "0.01",
    ]  # fmt: skip
    assert [given[key] for key in ("--device", "--compile", "--verify-layers")] == ["cpu", "block", "1"]
    assert {"num_layers=2", "tied_embeddings=false", "dropout=0.1"} <= set(words)
    assert "--checkpointing" in words
    asked = ["--offload", "--offload-ratio", "--host-memory-gib", "--device-memory-gib", "--bind"]
    assert [given[key] for key in [*asked, "--optimizer-in-backward"]] == [
        "nvme",
        "auto",
        "1.5",
        "40",
        "numa",
        "on",
    ]
    first = words.index("--nvme-path")
    assert words[first + 1 : first + 3] == [str(tmp_path), f"{tmp_path}/.."]


@pytest.mark.parametrize("from_file", [False, True])
def test_the_rerun_command_plans_the_same_row(tmp_path, from_file) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"stage": 1, "offload_optimizer": {"device": "cpu"}}')
    options = CompareOptions(
        **{**SMALL, "strategies": ("zero1",)}, config=(path,) if from_file else (), communicator=("c10d",),
        clip=(0.123456789,), lr=0.00123456789, offload=("cpu_optimizer",), offload_ratio=(0.123456789,),
        host_memory_gib=1.23456789, repeats=3, timeout_s=234567.5,
    )  # fmt: skip
    (row,) = make_plan(options).configurations
    plans = []

    def run(plan, *, launcher, **_) -> int:
        launcher.close()
        plans.append(plan)
        return 0

    arguments = shlex.split(rerun_command(row, options))[3:]
    CliRunner().invoke(cli.app, arguments, obj=run, catch_exceptions=False)
    assert plans[0].configurations == [row]
    assert plans[0].options.timeout_s == options.timeout_s
