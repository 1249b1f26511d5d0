"""`zerobench export`: what each tool is given, which row it comes from, and files that are changed in place."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import report_samples

from zerobench.engine.config import parse
from zerobench.errors import ConfigError, DataError
from zerobench.export.chosen import chosen_row
from zerobench.export.document import yaml_text
from zerobench.export.into import change_file
from zerobench.export.targets import TARGETS, exported
from zerobench.results.schema import Results, Row

ALIKE = {"batch_size": 2, "grad_accum": 3, "clip": 0.5, "precision": "bf16"}


def row_of(strategy: str, **settings: Any) -> tuple[Results, Row]:
    """Return the sample's results with one row of that strategy, and these settings."""
    results = report_samples.sample()
    row = next((row for row in results.rows if row.strategy == strategy), results.rows[0])
    row.strategy = strategy
    row.settings = row.settings.model_copy(
        update={"optimizer": {"lr": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}}
        | settings
    )
    return results, row


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [("zero0", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("ddp", 0), ("fsdp2", 3), ("deepspeed2", 2)],
)
def test_deepspeed_is_given_the_stage_and_the_batches(strategy: str, stage: int) -> None:
    document = exported(*row_of(strategy, **ALIKE), "deepspeed")
    values = json.loads(document.text)
    assert values["zero_optimization"]["stage"] == stage
    assert values["train_micro_batch_size_per_gpu"] == 2
    assert values["gradient_accumulation_steps"] == 3
    assert values["gradient_clipping"] == 0.5
    assert values["bf16"]["enabled"] and not values["fp16"]["enabled"]
    assert values["optimizer"]["params"]["lr"] == 0.002
    assert "steps_per_print" not in values and "timers" not in values
    assert bool(document.notes) == (strategy != "deepspeed2")


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "deepspeed3"])
def test_deepspeed_accepts_the_file(strategy: str) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    offload = "cpu_optimizer" if strategy != "zero1" else "none"
    values = json.loads(exported(*row_of(strategy, **ALIKE, offload=offload), "deepspeed").text)
    found = runtime.DeepSpeedConfig({**values, "train_batch_size": 2 * 3})
    assert found.zero_config.stage == int(strategy[-1])


@pytest.mark.parametrize("offload", ["none", "cpu_optimizer", "cpu_full", "nvme", "nvme_full"])
def test_our_own_reader_accepts_the_file(offload: str, tmp_path: Path) -> None:
    nvme = [str(tmp_path)] if offload.startswith("nvme") else []
    text = exported(*row_of("zero3", **ALIKE, offload=offload, nvme_paths=nvme), "zerobench").text
    config = parse(json.loads(text))
    assert (config.stage, config.precision, config.gradient_accumulation_steps) == (3, "bf16", 3)
    assert config.gradient_clipping == 0.5
    assert "rendezvous" not in text and "rank" not in json.loads(text)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("zero2", "DEEPSPEED"), ("fsdp2", "FSDP"), ("ddp", "MULTI_CPU"), ("deepspeed3", "DEEPSPEED")],
)
def test_accelerate_accepts_the_file(strategy: str, kind: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    text = exported(*row_of(strategy, **ALIKE), "accelerate").text
    values = yaml.safe_load(text)
    assert (values["distributed_type"], values["mixed_precision"]) == (kind, "bf16")
    if kind == "DEEPSPEED":
        assert values["deepspeed_config"]["zero_stage"] == int(strategy[-1])
        assert values["deepspeed_config"]["gradient_accumulation_steps"] == 3
    args = pytest.importorskip("accelerate.commands.config.config_args")
    (tmp_path / "config.yaml").write_text(text)
    assert args.load_config_from_file(str(tmp_path / "config.yaml")).distributed_type == kind


@pytest.mark.parametrize(
    ("strategy", "launch"),
    [
        ("zero0", "multi_gpu"),
        ("zero3", "zero3"),
        ("fsdp2", "fsdp2"),
        ("fsdp1", "fsdp1"),
        ("ddp", "multi_gpu"),
    ],
)
def test_trl_is_given_its_own_name_for_the_division(strategy: str, launch: str) -> None:
    yaml = pytest.importorskip("yaml")
    values = yaml.safe_load(exported(*row_of(strategy, **ALIKE, world_size=2), "trl").text)
    assert values["accelerate_config"] == launch
    assert values["adam_epsilon"] == 1e-8
    assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (2, 3)


def test_trl_says_that_its_configurations_do_not_offload() -> None:
    notes = exported(*row_of("zero2", offload="cpu_optimizer"), "trl").notes
    assert any("does not offload" in note for note in notes)


@pytest.mark.parametrize(("strategy", "reshards"), [("zero3", True), ("fsdp2", True), ("fsdp2_keep", False)])
def test_fsdp2_is_python_with_the_rows_settings(strategy: str, reshards: bool) -> None:
    text = exported(*row_of(strategy, **ALIKE, offload="cpu_full"), "fsdp2").text
    ast.parse(text)
    assert f'"reshard_after_forward": {reshards}' in text
    assert "torch.bfloat16" in text and "CPUOffloadPolicy()" in text and "0.5" in text


def test_fsdp2_refuses_what_it_cannot_do() -> None:
    with pytest.raises(DataError, match="swaps to NVMe"):
        exported(*row_of("zero3", offload="nvme"), "fsdp2")
    with pytest.raises(DataError, match="is of stage 1"):
        exported(*row_of("zero1"), "fsdp2")


def test_a_strategy_without_a_stage_is_exported_to_torchrun_alone() -> None:
    results, row = row_of("my.module:Mine", world_size=2, threads_per_rank=4)
    with pytest.raises(DataError, match="has no ZeRO stage"):
        exported(results, row, "deepspeed")
    words = shlex.split(exported(results, row, "torchrun").text)
    assert words == ["OMP_NUM_THREADS=4", "torchrun", "--standalone", "--nproc-per-node=2", "train.py"]


def test_more_ranks_than_the_machine_has_gpus_are_several_nodes() -> None:
    results, row = row_of("zero3", world_size=8, device="cuda")
    results.machine["gpus"] = [{}] * 4
    assert "--nnodes=2 --nproc-per-node=4" in exported(results, row, "torchrun").text


def test_an_unknown_tool_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'deepspeed'\? known: deepspeed, accelerate"):
        exported(*row_of("zero1"), "deepsped")


@pytest.mark.parametrize("target", TARGETS)
def test_every_tool_takes_the_fastest_row_of_the_sample(target: str) -> None:
    results, row = chosen_row(str(report_samples.SAMPLE))
    assert row.status == "ok" and row.strategy not in ("single", "compute_only")
    if target == "fsdp2":
        row.strategy = "zero3"
    assert exported(results, row, target).text.endswith("\n")


def test_a_row_is_chosen_by_its_name() -> None:
    names = [row.name for row in report_samples.sample().rows if row.strategy == "zero3"]
    _, row = chosen_row(f"{report_samples.SAMPLE}#{names[0]}")
    assert row.name == names[0]
    with pytest.raises(DataError, match=r"no row is named 'zs9'.*the rows are"):
        chosen_row(f"{report_samples.SAMPLE}#zs9")


def saved(tmp_path: Path, results: Results) -> str:
    (tmp_path / "results.json").write_text(results.model_dump_json())
    return str(tmp_path)


def test_rows_that_failed_and_several_workloads_are_refused(tmp_path: Path) -> None:
    place = saved(tmp_path, report_samples.mixed())
    failed = next(row for row in report_samples.mixed().rows if row.status == "failed")
    with pytest.raises(DataError, match=f"row {failed.name} is failed"):
        chosen_row(f"{place}#{failed.name}")
    with pytest.raises(DataError, match="no row is the fastest of all"):
        chosen_row(saved(tmp_path, report_samples.grid()))


FILE = """{
    "mine": [1, 2],
    "zero_optimization": {
        "round_robin_gradients": true,
        "stage": 1
    },
    "note": "http://a#b /* no comment */"
}
"""


def test_a_file_changed_in_place_keeps_its_keys_order_and_indentation(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(FILE)
    lines = change_file(path, {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0})
    text = path.read_text()
    assert list(json.loads(text)) == ["mine", "zero_optimization", "note", "gradient_clipping"]
    assert json.loads(text)["zero_optimization"] == {"round_robin_gradients": True, "stage": 3}
    assert text.splitlines()[1].startswith('    "mine"') and text.endswith("}\n")
    assert (tmp_path / "ds_config.json.bak").read_text() == FILE
    assert '-        "stage": 1' in lines and '+        "stage": 3' in lines


def test_a_file_that_says_it_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(FILE)
    assert change_file(path, {"zero_optimization": {"stage": 1}}) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["ds_config.json"]


@pytest.mark.parametrize("comment", ["// offload later", "/* x */", "# x"])
def test_a_file_with_comments_is_refused_with_the_line(tmp_path: Path, comment: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(FILE.replace('"mine"', f'{comment}\n    "mine"'))
    before = path.read_text()
    with pytest.raises(DataError, match="comment in line 2"):
        change_file(path, {"steps": 1})
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"JSON|holds no"):
        change_file(path, {"steps": 1})


def test_yaml_of_nested_scalars_reads_back() -> None:
    yaml = pytest.importorskip("yaml")
    values = {"a": {"b": {"c": None, "d": True}, "e": "on: #off"}, "f": 1e-8, "g": 'say "x"\n'}
    assert yaml.safe_load(yaml_text(values)) == values
