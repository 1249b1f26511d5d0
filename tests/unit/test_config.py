"""The engine's configuration: defaults, sentences of errors, files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zerobench.engine import config as config_module
from zerobench.engine import topology
from zerobench.engine.config import Config, LossScaleConfig, OffloadOptimizerConfig, OptimizerConfig, parse
from zerobench.errors import ConfigError


def test_defaults():
    config = parse(None)
    assert (config.stage, config.precision, config.gradient_accumulation_steps) == (0, "fp32", 1)
    assert config.gradient_clipping is None and config.units == "auto" and config.communicator == "auto"
    assert config.optimizer.type == "adamw" and config.optimizer.betas == (0.9, 0.999)
    assert parse(config) is config


def test_the_documentation_has_every_key_with_its_default():
    docs = Path(__file__).parents[2] / "docs" / "reference"
    ours, _, _ = (docs / "configuration.md").read_text().partition("## Files for compare")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", ours, re.MULTILINE)
    documented = {key: default for keys, default in rows for key in re.findall(r"`(\w+)`", keys)}
    fields = {**Config.model_fields, **OptimizerConfig.model_fields, **LossScaleConfig.model_fields}
    for key, field in fields.items():
        sections = ("optimizer", "loss_scale")
        expected = "see below" if key in sections else f"`{json.dumps(field.default)}`"
        assert documented.pop(key) == expected, key
    assert not documented, "keys that no longer exist"
    rows = re.findall(r"^\| (`.*?) \| (`.*?`) \| ", (docs / "offload.md").read_text(), re.MULTILINE)
    documented = {key: default for keys, default in rows for key in re.findall(r"`(\w+)`", keys)}
    for key, field in OffloadOptimizerConfig.model_fields.items():
        assert documented[key] == f"`{json.dumps(field.default)}`", key


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stagee": 2}, "unknown key 'stagee' in the configuration; did you mean 'stage'?"),
        ({"gradient_accumulation": 2}, "did you mean 'gradient_accumulation_steps'?"),
        (
            {"optimizer": {"learning": 1}},
            "unknown key 'optimizer.learning' in the configuration; known keys are",
        ),
        ({"optimizer": {"weight_decy": 1}}, "did you mean 'weight_decay'?"),
        ({"lr": 0.1}, "unknown key 'lr' in the configuration; did you mean 'optimizer.lr'?"),
        ({"betas": [0.9, 0.99]}, "did you mean 'optimizer.betas'?"),
        (
            {"optimizer": {"type": "AdamW"}, "bf16": {}, "zero_optimization": {}},
            "'zero_optimization' is a key of DeepSpeed's files",
        ),
        ({"train_batch_size": 8}, "docs/reference/configuration.md has the keys of zerobench's"),
        ({"loss_scale": {"initial": 1}}, "did you mean 'initial_scale'?"),
        ({"loss_scale": {"initial_scale": 0.5}}, "initial_scale 0.5 is below min_scale 1"),
        ({"stage": 4}, "'stage'"),
        ({"stage": "three"}, "'stage'"),
        ({"precision": "fp8"}, "'precision'"),
        ({"gradient_accumulation_steps": 0}, "greater than or equal to 1"),
        ({"gradient_clipping": 0}, "greater than 0"),
        ({"gradient_clipping": float("nan")}, "'gradient_clipping'"),
        ({"optimizer": {"lr": -1}}, "'optimizer.lr'"),
        ({"optimizer": {"lr": float("inf")}}, "'optimizer.lr'"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "each beta must be at least 0 and below 1"),
        ({"timeout_s": 0}, "'timeout_s'"),
        ({"timeout_s": 0.0009}, "greater than or equal to 0.001"),
        ({"timeout_s": 1e10}, "less than or equal to 1000000"),
        ({"timeout_s": float("inf")}, "'timeout_s'"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not below its world size 2"),
        ({"local_rank": 1, "local_world_size": 1}, "local_rank 1 is not below its world size 1"),
        ({"rendezvous": ""}, "'rendezvous'"),
        ({"prefetch_bytes": -1}, "'prefetch_bytes'"),
        ({"threads": 0}, "'threads'"),
        ({"offload_optimizer": {}}, "use stage 1, 2 or 3 with offload_optimizer"),
        ({"stage": 2, "offload_optimizer": {"device": "disk"}}, "'offload_optimizer.device'"),
        ({"stage": 2, "offload_optimizer": {"ratio": 0}}, "'offload_optimizer.ratio'"),
        ({"stage": 2, "offload_optimizer": {"ratio": "all"}}, "at most 1, or auto"),
        ({"stage": 2, "offload_optimizer": {"device_memory_bytes": 1}}, "remove it or set the ratio"),
        ({"stage": 2, "offload_optimizer": {"chunk_numel": 100}}, "multiple of 64"),
        ({"stage": 2, "offload_optimizer": {"chunk": 64}}, "did you mean 'chunk_numel'?"),
        (
            {"stage": 2, "offload_optimizer": {"numa_node": "first"}},
            "node': give a node's number, auto or null",
        ),
        ({"stage": 2, "offload_optimizer": {"numa_node": -1}}, "node': give a node's number, auto or null"),
        ({"units": "Block"}, "'units': give auto, or a list of modules' class names"),
        ({"units": [1]}, "'units': give auto, or a list of modules' class names"),
        ({"stage": 3, "offload_param": {}}, "offload_param needs offload_optimizer"),
        ({"stage": 2, "offload_optimizer": {}, "offload_param": {}}, "offload_param is for stage 3"),
        (
            {"stage": 3, "offload_optimizer": {"ratio": 0.5}, "offload_param": {}},
            "offload_param moves all shards of parameters",
        ),
        (
            {"stage": 3, "offload_optimizer": {}, "keep_parameter_shards": False},
            "remove keep_parameter_shards, or give offload_param",
        ),
        ({"store_param_remainders": True}, "is for masters of bfloat16 parameters, and these are float32"),
        (
            {"precision": "bf16", "param_dtype": "float16", "store_param_remainders": True},
            "and these are float16",
        ),
        (
            {"precision": "bf16", "store_param_remainders": True, "stage": 2, "offload_optimizer": {}},
            "remove offload_optimizer",
        ),
        (
            {
                "precision": "bf16",
                "store_param_remainders": True,
                "stage": 3,
                "keep_parameter_shards": False,
            },
            "keep_parameter_shards: false",
        ),
        ({"stage": 1, "offload_optimizer": {"device": "nvme"}}, "device nvme needs nvme_path"),
        (
            {"stage": 3, "offload_optimizer": {}, "offload_param": {"device": "nvme"}},
            "set offload_optimizer's device",
        ),
        ({"stage": 1, "offload_optimizer": {"nvme_path": "/disk"}}, "nvme_path configures device nvme"),
        *(
            (
                {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": path}},
                "an empty path names no",
            )
            for path in ("", ["/disk", ""])
        ),
        (
            {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "io_block_bytes": 5000}},
            "'offload_optimizer.io_block_bytes'",
        ),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/d"}}, "stage 0"),
        ([3], "a configuration is a mapping, the path of a JSON file or None, got list"),
        (3, "a configuration is a mapping, the path of a JSON file or None, got int"),
        ({"stage": True}, "'stage': give a number, not true"),
        ({"threads": True}, "'threads': give a number, not true"),
        ({"cpus": [0, False]}, "'cpus': give a number, not false"),
        ({"optimizer": {"lr": True}}, "'optimizer.lr': give a number, not true"),
        ({"optimizer": {"betas": [False, 0.9]}}, "'optimizer.betas': give a number, not false"),
    ],
)
def test_an_error_is_one_sentence_that_names_the_key(values, sentence):
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"stage": 3},
        {"stage": 2, "offload_optimizer": {}},
        {"stage": 3, "offload_optimizer": {}, "offload_param": {}},
    ],
)
def test_shards_may_be_left_out_where_they_are_not_needed(values):
    assert parse({**values, "keep_parameter_shards": False}).keep_parameter_shards is False


@pytest.mark.parametrize(
    ("values", "on_gpu", "on_cpu"),
    [
        ({"precision": "bf16"}, True, False),
        ({"precision": "bf16", "stage": 3}, True, False),
        ({"precision": "bf16", "store_param_remainders": False}, False, False),
        ({"precision": "bf16", "store_param_remainders": True}, True, True),
        ({"precision": "bf16", "stage": 3, "keep_parameter_shards": False}, False, False),
        ({"precision": "bf16", "stage": 2, "offload_optimizer": {}}, False, False),
        ({"precision": "bf16", "param_dtype": "float32"}, False, False),
        ({"precision": "fp16"}, False, False),
        ({}, False, False),
    ],
)
def test_remainders_are_stored_on_gpus_where_they_can_be(values, on_gpu, on_cpu):
    config = parse(values)
    assert config.stores_param_remainders(on_gpu=True) is on_gpu
    assert config.stores_param_remainders(on_gpu=False) is on_cpu


def test_one_path_is_a_list_of_one():
    config = parse({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}})
    assert config.offload_optimizer is not None
    assert config.offload_optimizer.nvme_path == ["/disk"]


def test_dtypes_by_role():
    assert parse({"precision": "bf16"}).effective_dtypes() == {
        "param": "bfloat16",
        "compute": "bfloat16",
        "reduce": "bfloat16",
        "accumulate": "bfloat16",
        "master": "float32",
        "state": "float32",
    }
    mixed = parse({"precision": "bf16", "reduce_dtype": "float32"})
    assert mixed.effective_dtypes()["reduce"] == "float32" and not mixed.scales_loss()
    low = parse({"precision": "fp32", "param_dtype": "bfloat16"}).effective_dtypes()
    assert (low["param"], low["compute"], low["reduce"]) == ("bfloat16", "bfloat16", "float32")
    assert parse({"precision": "fp16"}).scales_loss()
    assert parse({"reduce_dtype": "float16"}).scales_loss()


@pytest.mark.parametrize(
    ("steps", "given", "dtype"),
    [
        (1, "float32", "bfloat16"),  # one micro-batch is no sum
        (8, None, "bfloat16"),
        (9, None, "float32"),
        (2, "float32", "float32"),
        (512, "bfloat16", "bfloat16"),
    ],
)
def test_long_windows_accumulate_in_float32_unless_told(steps, given, dtype):
    values = {"precision": "bf16", "gradient_accumulation_steps": steps, "accumulate_dtype": given}
    assert parse(values).effective_dtypes()["accumulate"] == dtype


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"accumulate_dtype": "bfloat16"}, "reduced in float32: give float32, or remove"),
        (
            {"precision": "bf16", "accumulate_dtype": "float16"},
            "reduced in bfloat16: give float32 or bfloat16",
        ),
    ],
)
def test_sums_keep_what_is_reduced(values, words):
    with pytest.raises(ConfigError, match=words):
        parse(values)


@pytest.mark.parametrize(
    ("also", "words"),
    [
        ({"gradient_clipping": 1.0}, "before the gradient norm is known: remove gradient_clipping"),
        ({"precision": "fp16"}, "before an overflow is known: use bf16 or fp32"),
        ({"reduce_dtype": "float16"}, "before an overflow is known: use bf16 or fp32"),
    ],
)
def test_updates_in_backward_need_what_is_known_by_then(also, words):
    assert parse({"optimizer_in_backward": True}).optimizer_in_backward
    with pytest.raises(ConfigError, match=words):
        parse({"optimizer_in_backward": True, **also})


def test_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stage": 3, "optimizer": {"betas": [0.8, 0.9]}}), encoding="utf-8")
    assert parse(path) == parse(str(path)) == Config(stage=3, optimizer={"betas": (0.8, 0.9)})
    path.write_text('{"stage": 3,}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: .* in line 1"):
        config_module.load(path)
    path.write_text('{"optimizer": {"lr": 0.1, "lr": 0.2}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json has the key 'lr' more than once"):
        config_module.load(path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="must hold one JSON object, not a list"):
        config_module.load(path)
    path.write_text('{"stag": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'stag'.*'stage'"):
        config_module.load(path)
    with pytest.raises(ConfigError, match=r"cannot read configuration .*No such file"):
        config_module.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"stage": 1}\xff', "byte 13 is not UTF-8"),
        (b'{"stage": ' + b"1" * 5000 + b"}", "a number has too many digits"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
)
def test_what_no_parser_takes_is_one_sentence(tmp_path, content, reason):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json is not JSON: {reason}$"):
        config_module.load(path)


def test_ranks_come_from_the_configuration_then_the_environment():
    assert topology.resolve(parse(None), {}) == topology.Topology(0, 1, 0, 1)
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert topology.resolve(parse(None), environment) == topology.Topology(3, 4, 1, 2)
    assert topology.resolve(parse({"world_size": 1}), environment) == topology.Topology(0, 1, 0, 1)
    assert topology.resolve(parse({"rank": 1, "world_size": 2}), {}) == topology.Topology(1, 2, 1, 2)


def test_ranks_without_a_meeting_point():
    config = parse({"rank": 0, "world_size": 2})
    with pytest.raises(ConfigError, match="Start them with torchrun, or set the configuration's rendezvous"):
        topology.make_communicators(None, config, topology.resolve(config, {}), environment={})
    far = parse({"communicator": "shm", "rank": 0, "world_size": 4, "local_world_size": 2})
    with pytest.raises(ConfigError, match="'shm' connects ranks of one host"):
        topology.make_communicators(None, far, topology.resolve(far, {}), environment={})
