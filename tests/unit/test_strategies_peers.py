"""Peers that this machine cannot run: why they are skipped, and what they would be given."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import hf_zoo
import pytest
import torch
from builders import SMALL, make_settings, tiny_model
from torch.distributed.tensor import DTensor

from zerobench import strategies
from zerobench.bench.plan.config_files import read_row
from zerobench.errors import ConfigError
from zerobench.strategies import requirements, shared
from zerobench.strategies.deepspeed.config import MAX_BUCKET_NUMEL, bucket_numel, deepspeed_config

DEEPSPEED = [f"deepspeed{stage}" for stage in range(4)]
SUPER = "deepspeed3_super"
LEAVES = "deepspeed3_leaves"
DEEPCOMPILE = [f"deepcompile3{passes}" for passes in ("", "_prefetch", "_selective", "_both")]
MEGATRON = [f"mfsdp{stage}" for stage in (1, 2, 3)]
# A machine that has all that peers need, so that reasons are about the settings.
WELL_EQUIPPED = requirements.Tools(
    is_installed=lambda package: True,
    has_library=lambda name: True,
    has_nvcc=lambda: True,
    has_ninja=lambda: True,
    build_folder=lambda operator: "/nowhere",
)
DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def on_gpus(**fields):
    return make_settings(device="cuda", precision="bf16", **fields)


def test_every_peer_of_gpus_has_a_name_and_a_stage():
    assert set(strategies.available()) == {
        "single", "zero0", "zero1", "zero2", "zero3", "compute_only",
        "ddp", "ddp_compress", "ddp_master", "pipeline", "fsdp1", "fsdp2", "fsdp2_keep",
        *DEEPSPEED, LEAVES, SUPER, *DEEPCOMPILE, *MEGATRON,
    }  # fmt: skip
    assert [strategies.get(name).stage for name in DEEPSPEED] == [0, 1, 2, 3]
    assert [strategies.get(name).stage for name in (*MEGATRON, *DEEPCOMPILE)] == [1, 2, 3, 3, 3, 3, 3]


@pytest.mark.slow
def test_importing_every_strategy_imports_no_peer():
    code = (
        "import sys, zerobench.strategies as s\n"
        "[s.get(name) for name in s.available()]\n"
        "sys.exit('deepspeed' in sys.modules or 'megatron_fsdp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["fsdp1", *DEEPSPEED, LEAVES, *DEEPCOMPILE, *MEGATRON])
def test_peers_of_gpus_are_skipped_on_cpu_with_a_reason(name):
    assert "GPUs" in strategies.get(name).unsupported(make_settings())


@pytest.mark.parametrize(
    "name", ["single", "compute_only", "zero1", "ddp", "ddp_compress", "ddp_master", "fsdp2", "fsdp2_keep"]
)
def test_what_torch_brings_is_skipped_nowhere(name):
    assert strategies.get(name).unsupported(make_settings(precision="bf16")) is None
    assert strategies.get(name).unsupported(on_gpus(compile="block")) is None


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("ddp_compress", {"precision": "fp32"}, "ddp is the same"),
        ("ddp_master", {"precision": "fp32"}, "is the same as ddp"),
        ("deepspeed3", {"device": "cuda", "compile": "block"}, "use --compile whole or deepspeed3_leaves"),
        ("deepcompile3", {"device": "cuda", "compile": "block"}, "use --compile whole"),
        ("mfsdp3", {"device": "cuda", "compile": "whole"}, "use --compile block"),
        ("mfsdp1", {"device": "cuda", "precision": "fp16"}, "no loss scaling"),
    ],
)
def test_combinations_that_cannot_be_are_skipped_with_a_reason(name, fields, words):
    given = {} if name.startswith("ddp") else {"tools": WELL_EQUIPPED}
    assert words in strategies.get(name).unsupported(make_settings(**fields), **given)


@pytest.mark.parametrize("name", ["deepspeed3", "deepcompile3", "mfsdp3"])
def test_a_peer_is_skipped_where_it_is_not_installed(name):
    bare, settings = WELL_EQUIPPED._replace(is_installed=lambda package: False), on_gpus(world_size=2)
    assert "is not installed: pip install" in strategies.get(name).unsupported(settings, tools=bare)
    assert strategies.get(name).unsupported(settings, tools=WELL_EQUIPPED) is None


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ({"has_library": lambda name: name != "aio"}, "needs libaio, which is not installed"),
        ({"has_nvcc": lambda: False}, "install a CUDA toolkit"),
        ({"has_ninja": lambda: False}, "pip install ninja"),
    ],
)
def test_what_deepspeed_compiles_with_must_be_there(lacking, words):
    swaps = on_gpus(offload="nvme", nvme_paths=("/disk",))
    kind = strategies.get("deepspeed3")
    assert kind.unplaced(swaps, tools=WELL_EQUIPPED) is None
    assert words in kind.unplaced(swaps, tools=WELL_EQUIPPED._replace(**lacking))


def test_a_peer_that_is_not_installed_names_the_command_that_installs_it():
    reason = requirements.missing_package("no_such_package", "no-such-package>=1")
    assert reason == "no_such_package is not installed: pip install 'no-such-package>=1'"
    assert requirements.missing_package("torch", "torch") is None


def test_the_extras_install_what_the_reasons_name():
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml takes Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["deepspeed"] == [requirements.DEEPSPEED]
    assert extras["megatron"] == [requirements.MEGATRON_FSDP]


def test_buckets_are_a_quarter_of_the_model_within_bounds():
    assert bucket_numel(124_000_000) == 31_000_000
    assert bucket_numel(10_000) == 5_000_000
    assert bucket_numel(70_000_000_000) == MAX_BUCKET_NUMEL


def test_deepspeed_runs_overlapped_without_timers_and_asks_for_nothing_in_timed_steps():
    config = deepspeed_config(on_gpus(grad_accum=3), stage=2, parameter_count=100_000_000)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["reduce_bucket_size"]) == (2, True, 25_000_000)
    assert zero["compute_grad_norm"] is False
    assert config["gradient_accumulation_steps"] == 3
    assert config["timers"]["throughput"] == {"enabled": False, "synchronized": False}
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
    assert "optimizer" not in config  # torch's fused AdamW
    assert (
        "compute_grad_norm"
        not in deepspeed_config(on_gpus(clip=1.0), stage=2, parameter_count=1)["zero_optimization"]
    )
    assert (
        "compute_grad_norm"
        not in deepspeed_config(on_gpus(deterministic=True), stage=1, parameter_count=1)["zero_optimization"]
    )
    assert deepspeed_config(on_gpus(), stage=0, parameter_count=1)["optimizer"]["type"] == "AdamW"


@pytest.mark.parametrize(
    ("name", "leaves"),
    [
        ("deepspeed3_leaves", ["zerobench.models.transformer.Block"]),
        ("deepspeed3", []),
        ("deepcompile3", []),
    ],
)
def test_deepspeeds_stage_3_gathers_blocks_as_one(name, leaves):
    strategy = strategies.get(name)(on_gpus())
    assert strategy._leaf_classes(tiny_model(**SMALL)) == leaves
    config = deepspeed_config(on_gpus(), stage=3, parameter_count=1, leaf_classes=leaves)
    assert config["zero_optimization"].get("leaf_module", {"classes": []}) == {"classes": leaves}


def test_deepspeeds_own_linear_function_is_left_out_of_what_is_compiled():
    zeros = [
        deepspeed_config(on_gpus(compile=mode), stage=stage, parameter_count=1)["zero_optimization"]
        for stage, mode in ((3, "block"), (3, "whole"), (3, "none"), (2, "whole"))
    ]
    assert [zero.get("memory_efficient_linear", "as it is") for zero in zeros] == [
        False,
        False,
        "as it is",
        "as it is",
    ]


def test_a_deepspeed_files_keys_lie_over_ours_and_auto_leaves_them():
    options = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW"},
    }
    config = deepspeed_config(on_gpus(options=options), stage=3, parameter_count=80_000_000)
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 7
    assert config["zero_optimization"]["reduce_bucket_size"] == 20_000_000
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert "train_batch_size" not in config and "optimizer" not in config
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage 3 and this row runs 2"):
        deepspeed_config(on_gpus(options=options), stage=2, parameter_count=1)


def test_a_deepspeed_file_is_a_row(tmp_path):
    path = tmp_path / "ds.json"
    values = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.99], "eps": "auto"}},
    }
    path.write_text(json.dumps(values))
    strategy, decided, own = read_row(path, optimizer=DEFAULTS, device="cpu")
    assert (strategy, own) == ("deepspeed2", values)
    assert decided == {
        "config_file": str(path),
        "precision": "bf16",
        "batch_size": 8,
        "clip": 1.0,
        "optimizer": {**DEFAULTS, "lr": 0.01, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.0},
    }
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "compile": {"deepcompile": True}}))
    assert read_row(path, optimizer=DEFAULTS, device="cpu")[:2] == (
        "deepcompile3_both",
        {"config_file": str(path)},
    )
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 8}))
    assert read_row(path, optimizer=DEFAULTS, device="cpu")[0] == "deepspeed0"


@pytest.mark.parametrize(
    ("sections", "decided"),
    [
        ({"bf16": {"enabled": "auto"}}, {}),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, {}),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, {"precision": "fp16"}),
        ({"bf16": {"enabled": False}}, {"precision": "fp32"}),
        ({"bf16": {}, "gradient_clipping": "auto"}, {}),
        ({"gradient_clipping": 0.0}, {"clip": None}),
        ({"zero_optimization": {"offload_optimizer": {"ratio": "auto"}}}, {"offload": "none"}),
    ],
)
def test_a_deepspeed_file_decides_what_it_answers_and_leaves_auto_to_the_options(tmp_path, sections, decided):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **sections}))
    found = read_row(path, optimizer=DEFAULTS, device="cpu")[1]
    answers = ("precision", "clip", "offload", "batch_size", "grad_accum")
    assert {key: value for key, value in found.items() if key in answers} == decided


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage should be 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": {"stage": "auto"}}, "stage should be 0, 1, 2 or 3, got 'auto'"),
        ({"train_micro_batch_size_per_gpu": -3}, "per_gpu should be greater than 0, got -3"),
        ({"train_micro_batch_size_per_gpu": "4"}, "per_gpu should be a valid integer, got '4'"),
        ({"zero_optimization": {}, "gradient_accumulation_steps": 2.5}, "valid integer, got 2.5"),
        ({"zero_optimization": {}, "optimizer": {"params": {"betas": [0.9]}}}, "betas"),
        ({"zero_optimization": {}, "optimizer": {"params": {"lr": "1e-4"}}}, "lr should be a valid number"),
        ({"zero_optimization": {}, "scheduler": {"type": "WarmupLR"}}, "remove scheduler"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}},
            "optimizer's state there too",
        ),
        ({"zero_optimization": {}, "bf16": True}, "bf16 should be a valid dictionary, got True"),
        ({"train_batch_size": 64}, "train_micro_batch_size_per_gpu"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}, "less than or equal to 1, got 1.5"),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": -0.5}}},
            "greater than or equal to 0, got -0.5",
        ),
        (
            {"zero_optimization": {}, "gradient_clipping": -1.0},
            "gradient_clipping should be greater than or equal",
        ),
        *(
            ({"zero_optimization": {}, "optimizer": {"params": {key: -0.1}}}, f"{key} should be greater than")
            for key in ("lr", "eps", "weight_decay")
        ),
        ({"zero_optimization": {}, "optimizer": {"params": {"betas": [0.9, 1.0]}}}, "betas.* less than 1"),
        ({"zero_optimization": {}, "optimizer": {"params": {"betas": [0.9] * 3}}}, "at most 2 items"),
        ({"zero_optimization": {}, "optimizer": {"type": "Lamb"}}, "runs AdamW, not Lamb"),
        ({"zero_optimization": {}, "optimizer": {"params": {"amsgrad": True}}}, "amsgrad should be False"),
        (
            {"zero_optimization": {}, "optimizer": {"params": {"bias_correction": False}}},
            "bias_correction should be True",
        ),
        (
            {"zero_optimization": {}, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "bf16 and fp16 are both enabled",
        ),
        ({"zero_optimization": {}, "bfloat16": {"enabled": True}}, "give bf16 instead"),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "cpu_offload is a former name: give offload_optimizer",
        ),
        ({"zero_optimization": {"cpu_offload_param": True}}, "give offload_param instead"),
        ({"zero_optimization": {"stage": 1}, "compile": {"deepcompile": True}}, "stage 3 only"),
    ],
)
def test_deepspeed_files_that_cannot_be_compared_are_one_clear_line(tmp_path, values, words):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words):
        read_row(path, optimizer=DEFAULTS, device="cpu")


def test_devices_are_named_and_checked():
    assert shared.torch_device(make_settings()) == torch.device("cpu")
    assert shared.torch_device(
        make_settings(device="cuda", local_rank=3, local_world_size=4)
    ) == torch.device("cuda:3")
    with pytest.raises(ConfigError, match="known: cpu, cuda"):
        shared.torch_device(make_settings(device="tpu"))


def test_casting_parameters_leaves_buffers_and_ties_as_they_are():
    model = tiny_model(**SMALL)
    model.register_buffer("frequencies", torch.rand(3))
    shared.cast_parameters(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.frequencies.dtype == torch.float32
    assert model.lm_head.weight is model.wte.weight


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("8.0;9.0;10.0a", "9.0"),
        ("9.0a", "9.0"),
        ("Hopper", "9.0"),
        ("8.0 9.0+PTX", "8.0 9.0+PTX"),
        ("8.6;9.0", "8.6;9.0"),
        ("", ""),
    ],
)
def test_architectures_that_deepspeed_cannot_read_become_the_gpu_at_hand(listed, expected):
    for capability, found in ((9, 0), expected), (None, listed):
        environ = {"TORCH_CUDA_ARCH_LIST": listed}
        requirements.make_architectures_readable(environ, capability=capability)
        assert environ == {"TORCH_CUDA_ARCH_LIST": found}


def test_fsdp2_keeps_what_backward_needs_first_and_reshards_blocks(own_process_group) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    strategy = strategies.get("fsdp2")(make_settings(precision="bf16"))
    strategy.build(partial(hf_zoo.build, "meta-llama/Meta-Llama-3-8B", vocab_size=4096))
    model = strategy.module()
    weights = [model.model.layers[-1].mlp.up_proj, model.model.embed_tokens, model.model.norm, model.lm_head]

    def are_sharded() -> list[bool]:
        return [isinstance(module.weight, DTensor) for module in weights]

    batch = hf_zoo.batch()
    model(**batch)
    assert are_sharded() == [True, True, False, False]
    strategy.step([batch])
    assert are_sharded() == [True] * 4
    strategy.evaluate([batch])
    assert are_sharded() == [True] * 4
    strategy.close()
