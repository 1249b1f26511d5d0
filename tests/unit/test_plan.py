"""The grid, its names, and every refusal before work begins."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from zerobench import strategies
from zerobench.bench import fit
from zerobench.bench.defaults import choose_device, defaults_on
from zerobench.bench.given import given_ranks, slurm_first_host
from zerobench.bench.gpus import Gpu, VisibleGpus
from zerobench.bench.names import rerun_command, stage_of
from zerobench.bench.options import CompareOptions
from zerobench.bench.plan import Configuration, make_plan
from zerobench.errors import ConfigError, DataError, Error

SMALL = {"data": "synthetic", "strategies": ("zero0", "ddp"), "seq_lengths": (64,)}


def names(**options) -> list[str]:
    return [c.name for c in make_plan(CompareOptions(**{**SMALL, **options})).configurations]


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
        ({"grad_accums": (4,)}, "zs0_fp32_ranks2_bs4_sl64_ga4"),
        ({"clips": (1.0,)}, "zs0_fp32_ranks2_bs4_sl64_clip1"),
        ({"clips": (0.5,), "checkpointing": True}, "zs0_fp32_ranks2_bs4_sl64_clip0.5_ckpt"),
        ({"precisions": ("bf16",), "world_sizes": (3,)}, "zs0_bf16_ranks3_bs4_sl64"),
        ({"offloads": ("cpu_optimizer",)}, "zs0_fp32_ranks2_bs4_sl64_offload-cpu_optimizer"),
        (
            {"offloads": ("cpu_full",), "offload_ratios": (0.25,), "optimizer_in_backward": (True,)},
            "zs0_fp32_ranks2_bs4_sl64_offload-cpu_full_ratio0.25_inbackward",
        ),
    ],
)
def test_settings_that_are_not_the_default_are_in_the_name(options, name) -> None:
    assert names(**options)[0] == name


def test_the_grid_holds_every_combination_once_under_names_of_their_own() -> None:
    found = names(
        models=("tiny", "gpt2"),
        strategies=("single", "zero0", "zero3"),
        world_sizes=(2, 4),
        batch_sizes=(4, 8),
        clips=(None, 1.0),
    )
    # Per model, batch and clip: single once, two stages at two world sizes.
    assert len(found) == 2 * 2 * 2 * (1 + 2 * 2)
    assert len(set(found)) == len(found)


def test_world_size_changes_nothing_for_single() -> None:
    rows = make_plan(
        CompareOptions(**{**SMALL, "strategies": ("single", "ddp"), "world_sizes": (2, 3)})
    ).configurations
    assert [row.settings.world_size for row in rows if row.strategy == "single"] == [1]


def test_the_floor_has_a_gpu_of_its_own_and_a_share_of_the_cores() -> None:
    chosen = {**SMALL, "strategies": ("compute_only", "zero0")}
    on_cpu = make_plan(CompareOptions(**{**chosen, "world_sizes": (2, 3)})).configurations
    assert [row.settings.world_size for row in on_cpu if row.strategy == "compute_only"] == [2, 3]
    on_gpus = make_plan(CompareOptions(**{**chosen, **ON_GPUS, "world_sizes": (2, 4)})).configurations
    assert [row.settings.world_size for row in on_gpus if row.strategy == "compute_only"] == [1]


def test_settings_are_resolved() -> None:
    row = make_plan(CompareOptions(**{**SMALL, "num_layers": (2,)})).configurations[0]
    assert row.settings.model_config_resolved["num_layers"] == 2
    assert row.settings.parameter_count is not None and row.settings.parameter_count > 100_000
    assert row.settings.optimizer["beta1"] == 0.9
    assert row.stage == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models": ("tinny",)}, "'tiny'"),
        ({"model_options": {"num_layer": 2}}, "'num_layers'"),
        ({"strategies": ("zero_3",)}, "'zero3'"),
        ({"strategies": ("no.such.module:Class",)}, "no module named"),
        ({"strategies": ("zerobench.strategies.base:Nothing",)}, "'Nothing'"),
        ({"precisions": ("fp8",)}, "fp32"),
        ({"compiles": ("all",)}, "none, block, whole"),
        ({"attention": "flash"}, "flash_attention_2"),
        ({"attention": "eager"}, "hf:gpt2"),
        ({"dropout": 1.5}, "dropout"),
        ({"tf32": True}, "--tf32"),
        ({"verify_layers": 0}, "--verify-layers 0"),
        ({"batch_sizes": (4, 0)}, "--batch-size 0"),
        ({"seq_lengths": (0,)}, "--seq-length 0"),
        ({"grad_accums": (-1,)}, "--grad-accum -1"),
        ({"world_sizes": (0,)}, "--world-size 0"),
        ({"num_steps": 0}, "--num-steps 0"),
        ({"warmup_steps": -1}, "--warmup-steps -1"),
        ({"repeats": 0}, "--repeats 0"),
        ({"timeout_s": 0}, "--timeout 0"),
        ({"clips": (0.0,)}, "--clip 0"),
        ({"clips": (float("nan"),)}, "--clip nan"),
        ({"learning_rate": -1.0}, "--lr -1"),
        ({"rank_memory_gib": 0.0}, "--rank-memory-gib 0"),
        ({"seq_lengths": (100_000,)}, "max_seq_length"),
        ({"hidden_sizes": (65,)}, "num_heads"),
        ({"strategies": ()}, "at least one strategy"),
        ({"offloads": ("gpu",)}, "none, cpu_optimizer, cpu_full, nvme"),
        ({"offloads": ("cpu_full",), "offload_ratios": (1.5,)}, "--offload-ratio 1.5"),
        ({"offload_ratios": (0.5,)}, "add --offload"),
        ({"host_memory_gib": 1.0}, "add --offload"),
        ({"offloads": ("cpu_full",), "host_memory_gib": -1.0}, "--host-memory-gib -1"),
        ({"device_memory_gib": 0.0}, "--device-memory-gib 0"),
        ({"bind": "cores"}, "none, numa"),
        ({"offloads": ("nvme",)}, "add --nvme-path"),
        ({"nvme_paths": (Path("/"),)}, "add --offload nvme"),
        ({"offloads": ("nvme",), "nvme_paths": (Path("/no/such/folder"),)}, "No such file"),
        ({"offloads": ("nvme",), "nvme_paths": (Path("/proc"),)}, "--nvme-path /proc"),
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
    options = CompareOptions(**{**SMALL, "world_sizes": (4,)})
    assert make_plan(options, given_world_size=4).configurations[0].settings.world_size == 4
    with pytest.raises(ConfigError, match="leave it out"):
        make_plan(options, given_world_size=2)


def test_more_ranks_than_cores_is_a_warning() -> None:
    plan = make_plan(CompareOptions(**{**SMALL, "world_sizes": (4096,)}))
    assert "4096 ranks share" in plan.warnings[0]


def configuration(**options) -> Configuration:
    return make_plan(CompareOptions(**{**SMALL, **options})).configurations[0]


def test_rows_share_a_reference_when_they_train_the_same_global_batches() -> None:
    row = configuration(world_sizes=(4,))
    same = [
        configuration(world_sizes=(4,), strategies=("ddp",)),
        configuration(world_sizes=(2,), grad_accums=(2,)),
        configuration(world_sizes=(4,), checkpointing=True),
        configuration(world_sizes=(4,), num_steps=7),
    ]
    other = [
        configuration(world_sizes=(2,)),
        configuration(world_sizes=(4,), precisions=("bf16",)),
        configuration(world_sizes=(4,), batch_sizes=(2,)),
        configuration(world_sizes=(4,), clips=(1.0,)),
        configuration(world_sizes=(4,), seed=1),
        configuration(world_sizes=(4,), learning_rate=0.1),
        configuration(world_sizes=(4,), num_layers=(2,)),
    ]
    assert {one.reference_group() for one in same} == {row.reference_group()}
    assert row.reference_group() not in {one.reference_group() for one in other}


def test_stages_share_a_checksum_where_the_design_promises_it() -> None:
    stage0, stage3, ddp = make_plan(
        CompareOptions(**{**SMALL, "strategies": ("zero0", "zero3", "ddp")})
    ).configurations
    assert stage0.checksum_group() == stage3.checksum_group() is not None
    assert ddp.checksum_group() is None
    assert configuration(grad_accums=(2,)).checksum_group() is None
    # Never across world sizes: the order of a reduction differs.
    assert configuration(world_sizes=(4,)).checksum_group() != stage0.checksum_group()


def test_a_file_that_changes_arithmetic_shares_no_checksum(tmp_path) -> None:
    def group(**keys) -> str | None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"stage": 2, "precision": "bf16", **keys}))
        (row,) = make_plan(CompareOptions(**{**SMALL, "config_files": (path,)})).configurations
        return row.checksum_group()

    assert group() == configuration(strategies=("zero3",), precisions=("bf16",)).checksum_group()
    assert group(prefetch_bytes=0) == group(reduce_dtype="bfloat16") == group()
    for keys in ({"reduce_dtype": "float32"}, {"units": ["Block"]}, {"cast_forward_inputs": False}):
        assert group(**keys) not in (None, group())


def test_communicators_are_an_axis_of_our_rows() -> None:
    options = {**SMALL, "strategies": ("zero2", "ddp"), "communicators": ("auto", "c10d")}
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
        make_plan(CompareOptions(**{**options, "communicators": ("peer",)}))


def test_the_rerun_command_gives_the_same_row(tmp_path) -> None:
    row = configuration(
        models=("gpt2",), num_layers=(2,), model_options={"tied_embeddings": False}, strategies=("zero2",),
        world_sizes=(3,), grad_accums=(2,), clips=(0.5,), precisions=("bf16",), seed=7, num_steps=3, warmup_steps=1,
        checkpointing=True, learning_rate=0.01, compiles=("block",), dropout=0.1, offloads=("nvme",),
        offload_ratios=("auto",), nvme_paths=(tmp_path, tmp_path / ".."), host_memory_gib=1.5, device_memory_gib=40.0,
        bind="numa", optimizer_in_backward=(True,),
    )  # fmt: skip
    words = shlex.split(rerun_command(row, CompareOptions(learning_rate=0.01, verify_layers=1)))
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


def write_config(tmp_path, **keys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(keys))
    return path


def test_a_configuration_file_is_a_row(tmp_path) -> None:
    path = write_config(
        tmp_path, stage=3, precision="bf16", gradient_accumulation_steps=2, gradient_clipping=0.5,
        optimizer={"lr": 0.002, "betas": [0.8, 0.9]},
    )  # fmt: skip
    (row,) = make_plan(CompareOptions(**{**SMALL, "config_files": (path,)})).configurations
    assert (row.strategy, row.stage, row.settings.precision) == ("zero3", 3, "bf16")
    assert (row.settings.grad_accum, row.settings.clip) == (2, 0.5)
    # The reference must train with what the file sets, and with the comparison's values elsewhere.
    assert row.settings.optimizer == {
        "lr": 0.002,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert row.options["stage"] == 3 and "units" not in row.options
    assert row.name == "zs3_bf16_ranks2_bs4_sl64_ga2_clip0.5_mine"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"stge": 3}, "'stage'"),
        ({"rank": 0}, "leave it out"),
        ({"optimizer": {"type": "adam"}}, "adamw"),
        ({"stage": 4}, "stage"),
    ],
)
def test_a_wrong_configuration_file_is_named(tmp_path, keys, said) -> None:
    path = write_config(tmp_path, **keys)
    with pytest.raises(ConfigError) as caught:
        make_plan(CompareOptions(**{**SMALL, "config_files": (path,)}))
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_what_cannot_fit_is_found_before_it_starts() -> None:
    row = configuration(models=("gpt2-xl",), strategies=("ddp",))
    count = row.settings.parameter_count or 0
    assert fit.least_rank_bytes(row) == fit.Need(device=16 * count)
    sharded = configuration(models=("gpt2-xl",), strategies=("zero3",))
    assert fit.least_rank_bytes(sharded).device == pytest.approx(8 * count, rel=1e-6)
    reason = fit.why_too_large(row, rank_memory_bytes=1 << 30)
    assert reason is not None and "--rank-memory-gib" in reason.reason
    assert fit.why_too_large(configuration(), rank_memory_bytes=1 << 30) is None


def test_a_model_too_large_for_the_reference_is_verified_with_fewer_layers() -> None:
    row = configuration(models=("gpt2",))
    found = fit.verification_model(row.model, rank_memory_bytes=3 << 30)
    assert 1 <= found["num_layers"] < 12
    assert {**found, "num_layers": 12} == row.model
    assert fit.verification_model(configuration().model, rank_memory_bytes=3 << 30) == configuration().model
    assert fit.verification_model(row.model, rank_memory_bytes=None, layers=5)["num_layers"] == 5
    assert fit.verification_model(row.model, rank_memory_bytes=None, layers=50)["num_layers"] == 12


GPUS = tuple(
    Gpu(index=index, name="NVIDIA H200", uuid=str(index), total_bytes=140 << 30, compute_capability=(9, 0))
    for index in range(4)
)
ON_GPUS = {"device": "cuda", "gpus": GPUS, "world_sizes": (4,), "precisions": ("bf16",)}


def test_defaults_follow_the_device() -> None:
    cpu = defaults_on("cpu", gpu_num=0, cpu_num=8)
    assert (cpu.model, cpu.precision, cpu.world_size) == ("tiny", "fp32", 2)
    assert cpu.strategies[0] == "single"
    assert defaults_on("cpu", gpu_num=0, cpu_num=1).world_size == 1
    gpus = defaults_on("cuda", gpu_num=8, cpu_num=2, installed=lambda package: False)
    assert (gpus.model, gpus.precision, gpus.world_size) == ("gpt2", "bf16", 8)
    assert gpus.strategies == (
        "compute_only", "zero0", "zero1", "zero2", "zero3", "ddp", "ddp_master", "fsdp2",
    )  # fmt: skip


def test_installed_peers_join_the_defaults() -> None:
    asked = []
    found = defaults_on("cuda", gpu_num=1, cpu_num=1, installed=lambda package: asked.append(package) or True)
    assert asked == ["deepspeed", "megatron_fsdp"]
    assert found.strategies[7] == "fsdp2"
    assert found.strategies[8:] and all(stage_of(name) is not None for name in found.strategies[8:])


def test_the_device_is_chosen_by_what_torch_sees() -> None:
    none, four = VisibleGpus(reason="no driver"), VisibleGpus(gpus=GPUS)
    assert [choose_device(asked, four) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    assert [choose_device(asked, none) for asked in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="no driver"):
        choose_device("cuda", none)
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        choose_device("gpu", four)


def test_rows_on_gpus_say_so() -> None:
    strategies = ("single", "compute_only", "zero1", "fsdp2")
    found = names(**ON_GPUS, strategies=strategies, compiles=("none", "block"))
    assert found == [
        "single_bf16_gpus1_bs4_sl64",
        "compute_only_bf16_gpus1_bs4_sl64",
        "zs1_bf16_gpus4_bs4_sl64",
        "fsdp2_bf16_gpus4_bs4_sl64",
        "single_bf16_gpus1_bs4_sl64_compile-block",
        "compute_only_bf16_gpus1_bs4_sl64_compile-block",
        "zs1_bf16_gpus4_bs4_sl64_compile-block",
        "fsdp2_bf16_gpus4_bs4_sl64_compile-block",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_sizes": (2, 8)}, "torch sees 4"),
        ({"tf32": True}, "--precision fp32"),
        ({"rank_memory_gib": 1.0}, "--rank-memory-gib"),
    ],
)
def test_what_gpus_cannot_do_is_refused(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan(CompareOptions(**{**SMALL, **ON_GPUS, **options}))


def test_settings_of_gpu_rows_are_resolved() -> None:
    (row,) = make_plan(
        CompareOptions(**{**SMALL, **ON_GPUS, "strategies": ("zero1",), "dropout": 0.1})
    ).configurations
    settings = row.settings
    assert (settings.device, settings.compile, settings.attention) == ("cuda", "none", "sdpa")
    assert settings.dropout == row.model["dropout"] == 0.1
    assert settings.tf32 is None  # no question in bf16
    assert fit.verification_model(row.model, rank_memory_bytes=None, gpus=GPUS)["dropout"] == 0.0
    fp32 = configuration(**{**ON_GPUS, "precisions": ("fp32",), "tf32": True})
    assert fp32.settings.tf32 is True
    assert fp32.reference_group() != configuration(**{**ON_GPUS, "precisions": ("fp32",)}).reference_group()


def test_compiled_rows_share_a_reference_and_bits_with_their_own_kind() -> None:
    eager, block, whole = (configuration(**ON_GPUS, compiles=(mode,)) for mode in ("none", "block", "whole"))
    assert eager.reference_group() == block.reference_group() == whole.reference_group()
    groups = {row.checksum_group() for row in (eager, block, whole)}
    assert len(groups) == 3 and None not in groups


def test_what_cannot_fit_a_gpu_is_found_before_it_starts() -> None:
    small = [gpu.model_copy(update={"total_bytes": 8 << 30}) for gpu in GPUS]
    row = configuration(**ON_GPUS, models=("gpt2-xl",), strategies=("ddp",))
    reason = fit.why_too_large(row, rank_memory_bytes=None, gpus=small)
    assert reason is not None and "GPU 0 has 8.00" in reason.reason
    assert fit.why_too_large(row, rank_memory_bytes=None, gpus=GPUS) is None
    found = fit.verification_model(row.model, rank_memory_bytes=None, gpus=small)
    assert 1 <= found["num_layers"] < 48


@pytest.mark.parametrize("strategy", strategies.available())
def test_stages_by_name_are_those_of_the_classes(strategy) -> None:
    assert stage_of(strategy) == strategies.get(strategy).stage


def test_a_strategy_of_ones_own_has_no_known_stage() -> None:
    assert stage_of("zero3.mine:Strategy") is None


TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "70001", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a,b",
}  # fmt: skip


def test_ranks_of_torchrun_and_srun_are_found() -> None:
    for environment in (TORCHRUN, SRUN):
        given = given_ranks(environment)
        assert given is not None
        assert (given.rank, given.world_size, given.local_rank, given.local_world_size) == (3, 4, 1, 2)
    assert given_ranks({}) is None
    # A batch script has a process id and one process.
    assert given_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        given_ranks({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})
    assert slurm_first_host("one,two") == "one"
