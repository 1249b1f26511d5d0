"""Plans on GPUs, and what a device decides by default."""

from __future__ import annotations

import pytest
from plan_samples import GPUS, ON_GPUS, SMALL, configuration, names, verification_model

from zerobench.bench.plan.defaults import choose_device, defaults_on
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.errors import ConfigError
from zerobench.host.gpus import VisibleGpus
from zerobench.strategies.catalogue import known_facts


def test_defaults_follow_the_device() -> None:
    cpu = defaults_on("cpu", gpu_num=0, cpu_num=8)
    keys = ("model", "precision", "world_size", "warmup_steps")
    assert [cpu[key] for key in keys] == [("tiny",), ("fp32",), (2,), 5]
    assert cpu["strategies"][0] == "single"
    assert defaults_on("cpu", gpu_num=0, cpu_num=1)["world_size"] == (1,)
    gpus = defaults_on("cuda", gpu_num=8, cpu_num=2, installed=lambda package: False)
    assert [gpus[key] for key in keys] == [("gpt2",), ("bf16",), (8,), 20]
    assert gpus["strategies"] == (
        "compute_only", "zero0", "zero1", "zero2", "zero3",
        "ddp", "ddp_compress", "ddp_master", "fsdp1", "fsdp2", "fsdp2_keep",
    )  # fmt: skip


def test_installed_peers_join_the_defaults() -> None:
    asked = []
    found = defaults_on("cuda", gpu_num=1, cpu_num=1, installed=lambda package: asked.append(package) or True)
    assert asked == ["deepspeed", "megatron_fsdp"]
    own = defaults_on("cuda", gpu_num=1, cpu_num=1, installed=lambda package: False)["strategies"]
    assert found["strategies"][: len(own)] == own
    further = found["strategies"][len(own) :]
    assert further and all(known_facts(name).stage is not None for name in further)


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
    found = names(**ON_GPUS, strategies=strategies, compile=("none", "block"))
    assert found == [
        "single_bf16_gpus1_bs4_sl64",
        "compute_only_bf16_gpus4_bs4_sl64",
        "zs1_bf16_gpus4_bs4_sl64",
        "fsdp2_bf16_gpus4_bs4_sl64",
        "single_bf16_gpus1_bs4_sl64_compile-block",
        "compute_only_bf16_gpus4_bs4_sl64_compile-block",
        "zs1_bf16_gpus4_bs4_sl64_compile-block",
        "fsdp2_bf16_gpus4_bs4_sl64_compile-block",
    ]


def test_deepcompile_is_one_row_compiled_as_a_whole_beside_rows_of_every_mode() -> None:
    strategies = ("zero1", "deepcompile3_both")
    options = CompareOptions(
        **{**SMALL, **ON_GPUS, "strategies": strategies, "compile": ("block", "none", "whole")}
    )
    assert [(row.strategy, row.settings.compile) for row in make_plan(options).configurations] == [
        ("zero1", "block"),
        ("deepcompile3_both", "whole"),
        ("zero1", "none"),
        ("zero1", "whole"),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": (2, 8)}, "torch sees 4"),
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
    assert verification_model(row.model, gpus=GPUS)["dropout"] == 0.0
    fp32 = configuration(**{**ON_GPUS, "precision": ("fp32",), "tf32": True})
    assert fp32.settings.tf32 is True
    assert fp32.reference_group() != configuration(**{**ON_GPUS, "precision": ("fp32",)}).reference_group()
