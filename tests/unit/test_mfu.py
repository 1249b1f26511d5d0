"""Model FLOP/s utilisation: known peaks, and nothing where none is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerobench import bench, models
from zerobench.bench.mfu import likely_compute_s, peak_tflops, utilisation
from zerobench.results.schema import Row, RowDtypes, Settings


def row(*, compute: str = "bfloat16", tokens_per_s: float | None = 1e6) -> Row:
    config = models.resolve("gpt2")
    settings = Settings(
        model="gpt2", model_config_resolved=config.model_dump(), world_size=4, precision="bf16", batch_size=8,
        seq_length=1024, grad_accum=1,
    )  # fmt: skip
    dtypes = RowDtypes(
        param="bfloat16", compute=compute, reduce="bfloat16", master="float32", state="float32"
    )
    return Row(
        name="r",
        strategy="ddp",
        status="ok",
        settings=settings,
        dtypes=dtypes,
        tokens_per_s=tokens_per_s,
    )


def test_utilisation_is_flops_over_the_peak_of_all_gpus() -> None:
    found = utilisation(row(), "NVIDIA H200")
    assert found is not None
    # GPT-2's 124 M parameters, of which the position table takes no part in a product, and attention.
    by_hand = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert found.flops_per_token == pytest.approx(
        by_hand, rel=2e-3
    )  # biases and norms are no products either
    assert found.tflops_per_gpu == pytest.approx(found.flops_per_token * 1e6 / 4 / 1e12)
    assert found.pct == pytest.approx(100 * found.tflops_per_gpu / 989.4)
    assert found.peak_of == "NVIDIA H200, bf16 dense"


def test_of_a_mixture_the_experts_that_a_token_goes_to_count() -> None:
    def flops(experts_per_token: int) -> float:
        config = models.resolve("mistralai/Mixtral-8x7B-v0.1", {"num_layers": 3})
        config = config.model_copy(update={"experts_per_token": experts_per_token})
        return models.flops_per_token(config, 128)

    expert = 3 * 4096 * 14336  # gate, up and down
    assert flops(4) - flops(2) == pytest.approx(6 * 3 * 2 * expert)


@pytest.mark.parametrize(
    ("precision", "tf32", "checkpointing", "peak"),
    [
        ("bf16", None, False, 989.4),
        ("bf16", None, True, 989.4),
        ("fp32", True, False, 494.7),
        ("fp32", False, False, 66.9),
    ],
)
def test_a_step_is_likely_to_run_at_half_the_peak(precision, tf32, checkpointing, peak) -> None:
    settings = row().settings.model_copy(
        update={"precision": precision, "tf32": tf32, "checkpointing": checkpointing, "grad_accum": 2}
    )
    found = utilisation(row(), "NVIDIA H200")
    assert found is not None
    tokens = 8 * 1024 * 2  # of a rank
    passes = 4 if checkpointing else 3  # forward, and backward as long as two; forward again
    expected_s = passes / 3 * tokens * found.flops_per_token / (peak / 2 * 1e12)
    assert likely_compute_s(settings, "NVIDIA H200") == pytest.approx(expected_s)
    assert likely_compute_s(settings, "Some other GPU") is None


def test_the_peak_is_that_of_the_dtype_that_multiplies() -> None:
    assert peak_tflops("NVIDIA H200", "tf32") == 494.7
    assert peak_tflops("NVIDIA H200", "float32") == 66.9
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float16") == 312
    tf32 = utilisation(row(compute="tf32"), "NVIDIA H200")
    assert tf32 is not None and tf32.peak_of == "NVIDIA H200, tf32 dense"


def test_an_unknown_peak_gives_no_figure() -> None:
    assert utilisation(row(), "NVIDIA H200 MIG 1g.18gb") is None
    assert (
        utilisation(row(), "NVIDIA A100-SXM-64GB") is None
    )  # 124 multiprocessors, not the 108 of the data sheet
    assert utilisation(row(), "Some other GPU") is None
    assert utilisation(row(compute="float8_e4m3fn"), "NVIDIA H200") is None
    assert utilisation(row(), "Tesla T4") is None  # no bf16 units
    assert utilisation(row(tokens_per_s=None), "NVIDIA H200") is None


def test_every_peak_has_a_source_and_a_name_of_its_own() -> None:
    data = json.loads((Path(bench.__file__).parent / "gpu_peaks.json").read_text())
    names = [name for device in data["devices"] for name in device["names"]]
    assert len(set(names)) == len(names)
    for device in data["devices"]:
        assert device["source"]
        assert device["fp16"] > device["fp32"] > 0
        assert device["tf32"] is None or device["tf32"] == pytest.approx(device["bf16"] / 2, rel=0.02)
