"""Configuration files as rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_samples import ON_GPUS, SMALL

from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.errors import ConfigError


def write_config(tmp_path, **keys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(keys))
    return path


def test_a_configuration_file_is_a_row(tmp_path) -> None:
    path = write_config(
        tmp_path, stage=3, precision="bf16", gradient_accumulation_steps=2, gradient_clipping=0.5,
        optimizer={"lr": 0.002, "betas": [0.8, 0.9]},
    )  # fmt: skip
    (row,) = make_plan(CompareOptions(**{**SMALL, "config": (path,)})).configurations
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
        ({"rank": 0}, "remove it"),
        ({"optimizer": {"type": "adam"}}, "adamw"),
        ({"stage": 4}, "stage"),
        (
            {"stage": 1, "communicator": "nccl"},
            "communicator nccl does not run on cpu: use one of auto, shm, c10d",
        ),
        ({"stage": 1, "device": "cuda"}, "device cuda differs from the comparison's device, cpu"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr 0 trains nothing"),
        (
            {"zero_optimization": {}, "optimizer": {"params": {"lr": 0}}},
            "optimizer.params.lr 0 trains nothing",
        ),
    ],
)
def test_a_wrong_configuration_file_is_named(tmp_path, keys, said) -> None:
    path = write_config(tmp_path, **keys)
    with pytest.raises(ConfigError) as caught:
        make_plan(CompareOptions(**{**SMALL, "config": (path,)}))
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_the_global_batch_of_a_deepspeed_file_is_that_of_its_rows(tmp_path) -> None:
    """DeepSpeed would refuse the one, and take another accumulation for the other."""
    batch = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}
    for further in ({"gradient_accumulation_steps": 3, "train_batch_size": 12}, {"train_batch_size": 4}, {}):
        path = write_config(tmp_path, **batch, **further)
        (row,) = make_plan(CompareOptions(**{**SMALL, "config": (path,)})).configurations
        assert row.settings.batch_size == 2
    for further in ({"gradient_accumulation_steps": 3, "train_batch_size": 8}, {"train_batch_size": 16}):
        path = write_config(tmp_path, **batch, **further)
        with pytest.raises(ConfigError, match=r"x 2 ranks = (12|4): remove it, or make them equal"):
            make_plan(CompareOptions(**{**SMALL, "config": (path,)}))


def test_what_a_file_says_of_its_device_is_that_of_the_comparison(tmp_path) -> None:
    on_gpus = {**SMALL, **ON_GPUS, "precision": ("fp32",)}
    path = write_config(tmp_path, stage=1, device="cuda", communicator="nccl")
    (row,) = make_plan(CompareOptions(**{**on_gpus, "config": (path,)})).configurations
    assert row.options["communicator"] == "nccl"
    path = write_config(tmp_path, stage=1, device="cpu")
    with pytest.raises(ConfigError, match="device cpu differs from the comparison's device, cuda"):
        make_plan(CompareOptions(**{**on_gpus, "config": (path,)}))
    path = write_config(tmp_path, stage=1, communicator="shm")
    with pytest.raises(
        ConfigError, match="communicator shm does not run on cuda: use one of auto, nccl, peer"
    ):
        make_plan(CompareOptions(**{**on_gpus, "config": (path,)}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff", "is not JSON"),
        (b'{"zero_optimization": ' + b"[" * 100_000, "is not JSON"),
        (b'{"zero_optimization": {}, "x": ' + b'{"x": ' * 900 + b"0" + b"}" * 901, "nested too deeply"),
        (b'{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' more than once"),
        (b'{"zero_optimization": {"stage": true}}', "zero_optimization.stage"),
    ],
    ids=["bytes", "brackets", "braces", "twice", "true"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, said) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        make_plan(CompareOptions(**{**SMALL, "config": (path,)}))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_file_leaves_open_of_its_offload_the_options_decide(tmp_path) -> None:
    def row(**keys):
        options = {"offload_ratio": (0.5,), "host_memory_gib": 2.0}
        path = write_config(tmp_path, **keys)
        (found,) = make_plan(CompareOptions(**{**SMALL, "config": (path,)}, **options)).configurations
        return found.settings

    for keys in (
        {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}},
    ):
        found = row(**keys)
        assert (found.offload, found.offload_ratio, found.host_memory_gib) == ("cpu_optimizer", 0.5, 2.0)
    with pytest.raises(ConfigError, match=r"--offload-ratio 0\.5 has no effect"):
        row(stage=1, offload_optimizer={"device": "cpu", "ratio": 0.25})
    with pytest.raises(ConfigError, match="has no effect"):
        row(stage=1)


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({"stage": 1, "precision": "bf16"}, {"precision": ("fp32",)}, "--precision fp32"),
        ({"stage": 1, "precision": "bf16"}, {"precision": ("bf16",)}, None),
        ({"stage": 1}, {"precision": ("fp16",)}, None),
        ({"stage": 1, "gradient_accumulation_steps": 2}, {"grad_accum": (2, 1)}, "--grad-accum 1"),
        ({"stage": 1, "gradient_clipping": 0.5}, {"clip": (None,)}, "--clip none"),
        ({"stage": 1, "optimizer": {"lr": 0.1}}, {"lr": 0.001}, "--lr 0.001"),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, {"offload": ("none",)}, "--offload none"),
        ({"stage": 1, "optimizer_in_backward": False}, {"optimizer_in_backward": (True,)}, "backward on"),
        ({"stage": 1, "communicator": "c10d"}, {"communicator": ("shm",)}, "--communicator shm"),
        (
            {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8},
            {"batch_size": (4,)},
            "--batch-size 4",
        ),
    ],
)
def test_what_a_file_decides_cannot_be_asked_for_otherwise(tmp_path, keys, options, said) -> None:
    names = {"precision": "--precision", "grad_accum": "--grad-accum", "clip": "--clip", "lr": "--lr",
             "offload": "--offload", "optimizer_in_backward": "--optimizer-in-backward",
             "communicator": "--communicator", "batch_size": "--batch-size"}  # fmt: skip
    values = {**SMALL, **options, "config": (write_config(tmp_path, **keys),)}
    make_plan(CompareOptions(**values))  # a default gives way
    asked = CompareOptions(**values, given=frozenset(names[key] for key in options))
    if said is None:
        make_plan(asked)
        return
    with pytest.raises(ConfigError, match=f"{said} has no effect: every --config file"):
        make_plan(asked)


def test_what_no_strategy_follows_is_refused(tmp_path) -> None:
    for strategies, options, given in (
        (("ddp",), {"communicator": ("shm",)}, "--communicator"),
        (("single",), {"offload": ("cpu_optimizer",)}, "--offload"),
        (("single",), {"optimizer_in_backward": (True,)}, "--optimizer-in-backward"),
        (
            ("fsdp2",),
            {"offload": ("nvme",), "nvme_paths": (tmp_path,), "io_engine": "threads"},
            "--io-engine",
        ),
    ):
        asked = {**SMALL, **options, "given": frozenset({given})}
        with pytest.raises(ConfigError, match=f"{given} .* has no effect: no strategy of this comparison"):
            make_plan(CompareOptions(**{**asked, "strategies": strategies}))
        make_plan(CompareOptions(**{**asked, "strategies": (*strategies, "zero3")}))


def test_a_file_that_swaps_takes_its_own_folder_or_the_options(tmp_path) -> None:
    def paths(*given, **section):
        zero = {"stage": 3, "offload_optimizer": {"device": "nvme", **section}}
        path = write_config(tmp_path, zero_optimization=zero)
        options = {**SMALL, "config": (path,), "nvme_paths": given}
        return make_plan(CompareOptions(**options)).configurations[0].settings.nvme_paths

    assert paths(tmp_path) == [str(tmp_path)]
    disk = str(tmp_path / "disk")
    Path(disk).mkdir()
    assert paths(nvme_path=disk) == [disk]
    with pytest.raises(ConfigError, match="or --nvme-path"):
        paths()
    with pytest.raises(ConfigError, match=r"--nvme-path .* has no effect"):
        paths(tmp_path, nvme_path=disk)


@pytest.mark.parametrize("of_deepspeed", [False, True])
@pytest.mark.parametrize("given", ["no/such", "file", "\0"])
def test_a_file_that_swaps_where_nothing_can_be_written_is_refused(tmp_path, given, of_deepspeed) -> None:
    (tmp_path / "file").touch()
    section = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / given)}}
    keys = {"zero_optimization": {"stage": 1, **section}} if of_deepspeed else {"stage": 1, **section}
    path = write_config(tmp_path, **keys)
    with pytest.raises(ConfigError, match=rf"{path}: nvme_path .*{given} cannot take files"):
        make_plan(CompareOptions(**{**SMALL, "config": (path,)}))


def test_a_folder_is_named_once_however_it_is_written(tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    folders = (tmp_path, tmp_path / "link")
    with pytest.raises(ConfigError, match=r"^--nvme-path .* names a folder twice"):
        make_plan(CompareOptions(**{**SMALL, "offload": ("nvme",), "nvme_paths": folders}))
    section = {"device": "nvme", "nvme_path": [str(folder) for folder in folders]}
    path = write_config(tmp_path, stage=1, offload_optimizer=section)
    with pytest.raises(ConfigError, match=rf"^{path}: nvme_path .* names a folder twice"):
        make_plan(CompareOptions(**{**SMALL, "config": (path,)}))
    # DeepSpeed has a path for each of two sections, which may be the same folder.
    sections = {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        "offload_param": {"device": "nvme", "nvme_path": f"{tmp_path}/link/.."},
    }
    path = write_config(tmp_path, zero_optimization={"stage": 3, **sections})
    (row,) = make_plan(CompareOptions(**{**SMALL, "config": (path,)})).configurations
    assert len(row.settings.nvme_paths) == 1


def test_numbers_that_tell_rows_apart_give_way_to_names_of_files(tmp_path) -> None:
    paths = [tmp_path / place for place in ("a/c.json", "b/c.json", "a/c_2.json", "b/c_2.json")]
    for stage, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"stage": 1, "keep_root_bytes": stage}))
    rows = make_plan(CompareOptions(**{**SMALL, "config": paths})).configurations
    assert [row.name.removeprefix("zs1_fp32_ranks2_bs4_sl64_") for row in rows] == [
        "c", "c_3", "c_2", "c_2_2",
    ]  # fmt: skip
