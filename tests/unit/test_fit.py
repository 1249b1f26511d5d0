"""Rows that cannot fit are found before they start."""

from __future__ import annotations

from functools import partial

import pytest
from plan_samples import GPUS, ON_GPUS, configuration, verification_model, why_too_large

from zerobench import models
from zerobench.bench import jobs
from zerobench.bench.plan import fit
from zerobench.models.hf_config import RANDOM_WEIGHTS
from zerobench.results.sizes import GIB


def test_what_cannot_fit_is_found_before_it_starts() -> None:
    row = configuration(model=("gpt2-xl",), strategies=("ddp",))
    count = row.settings.parameter_count or 0
    assert fit.least_rank_bytes(row) == fit.Need(device=16 * count)
    sharded = configuration(model=("gpt2-xl",), strategies=("zero3",))
    assert fit.least_rank_bytes(sharded).device == pytest.approx(8 * count, rel=1e-6)
    bf16 = {"model": ("gpt2-xl",), "precision": ("bf16",), "world_size": (2,)}
    for strategy, whole, remainders in (("zero0", 16, 14), ("zero1", 10, 9), ("zero3", 7, 7)):
        row = configuration(strategies=(strategy,), **bf16)
        assert fit.least_rank_bytes(row) == fit.Need(device=whole * count), strategy
        row = row.model_copy(update={"options": {"store_param_remainders": True}})
        assert fit.least_rank_bytes(row) == fit.Need(device=remainders * count), strategy
        on_gpus = configuration(strategies=(strategy,), model=("gpt2-xl",), **ON_GPUS | {"world_size": (2,)})
        assert fit.least_rank_bytes(on_gpus) == fit.Need(device=remainders * count), strategy
        whole_masters = on_gpus.model_copy(update={"options": {"store_param_remainders": False}})
        assert fit.least_rank_bytes(whole_masters) == fit.Need(device=whole * count), strategy
    row = configuration(model=("gpt2-xl",), strategies=("ddp",))
    reason = why_too_large(row, rank_memory_bytes=1 << 30)
    assert reason is not None and "--rank-memory-gib" in reason.reason
    assert why_too_large(configuration(), rank_memory_bytes=1 << 30) is None


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_logits_that_cannot_fit_are_found_before_it_starts(precision, itemsize) -> None:
    logits_bytes = 6 * 128 * 50257 * itemsize
    options = {"model": ("gpt2",), "precision": (precision,), "batch_size": (6,), "seq_length": (128,)}
    for on in ({}, ON_GPUS):
        row = configuration(**{**options, **on, "precision": (precision,)})
        assert fit.logits_bytes(row) == logits_bytes
    gpus = [gpu.model_copy(update={"total_bytes": 80 << 30}) for gpu in GPUS]
    options |= {"batch_size": (10_000_000,), "strategies": ("zero3",)}
    for on, words in (({}, "and the host has available"), (ON_GPUS, "on each rank and GPU 0 has 80.00")):
        row = configuration(**{**options, **on, "precision": (precision,)})
        found = why_too_large(row, gpus=gpus if on else ())
        assert found is not None and found.reason.startswith("the logits of one micro-batch alone need")
        assert words in found.reason
    own = configuration(**{**options, "strategies": ("zerobench.strategies.single:SingleStrategy",)})
    assert fit.logits_bytes(own) == 0


# Bytes a parameter on the device and on the host, of two ranks in fp32 and in bf16.
WHAT_EACH_RANK_HOLDS = [
    ("ddp", {}, (16, 0), (16, 0)),  # fp32 parameters under autocast
    ("ddp_master", {}, (16, 0), (16, 0)),
    ("zero0", {}, (16, 0), (16, 0)),
    ("zero1", {}, (4 + 4 + 8 / 2, 0), (2 + 2 + 12 / 2, 0)),
    ("zero2", {}, (4 + 4 / 2 + 8 / 2, 0), (2 + 2 / 2 + 12 / 2, 0)),
    ("zero3", {}, (16 / 2, 0), (14 / 2, 0)),  # parameters may be rounded from masters
    ("fsdp2", {}, (16 / 2, 0), (16 / 2, 0)),
    # Gradients may end as they come.
    ("zero2", {"optimizer_in_backward": (True,)}, (4 + 8 / 2, 0), (2 + 12 / 2, 0)),
    ("zero3", {"optimizer_in_backward": (True,)}, (12 / 2, 0), (12 / 2, 0)),
    # Nothing is known of it but that it may divide all.
    ("zerobench.strategies.single:SingleStrategy", {}, (16 / 2, 0), (16 / 2, 0)),
    ("compute_only", {}, (4 + 4, 0), (2 + 2, 0)),
    ("zero2", {"offload": ("cpu_optimizer",)}, (4, 8 / 2), (2, 12 / 2)),
    ("zero2", {"offload": ("cpu_optimizer",), "offload_ratio": (0.25,)}, (4 + 3, 1), (2 + 4.5, 1.5)),
    ("zero3", {"offload": ("cpu_full",)}, (0, 4 / 2 + 8 / 2), (0, 2 / 2 + 12 / 2)),
    ("zero3", {"offload": ("nvme",)}, (4 / 2, 0), (2 / 2, 0)),
    ("zero3", {"offload": ("nvme_full",)}, (0, 0), (0, 0)),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("strategy", "options", "in_fp32", "in_bf16"), WHAT_EACH_RANK_HOLDS)
def test_what_a_rank_cannot_do_without(tmp_path, strategy, options, in_fp32, in_bf16, precision) -> None:
    paths = {"nvme_paths": (tmp_path,)} if "nvme" in str(options) else {}
    row = configuration(strategies=(strategy,), world_size=(2,), precision=(precision,), **options, **paths)
    need, count = fit.least_rank_bytes(row), row.settings.parameter_count or 0
    each = in_fp32 if precision == "fp32" else in_bf16
    assert (need.device, need.host) == (each[0] * count, each[1] * count)


def test_every_rank_of_a_host_needs_its_own_part_of_it() -> None:
    # CPU ranks, whose device is the host: 4 bytes a parameter, and of 8 each rank its part.
    offloading = partial(configuration, model=("gpt2-xl",), strategies=("zero2",), offload=("cpu_optimizer",))
    on_two, on_three = offloading(world_size=(2,)), offloading(world_size=(3,))
    count = on_two.settings.parameter_count or 0
    has = {"memory_available_bytes": 16 * count}
    assert why_too_large(on_two, **has) is None
    found = why_too_large(on_three, **has)
    assert found is not None and found.tier == "host"
    needed, available = fit.two_amounts(20 * count, 16 * count)
    assert f"need {needed} for 3 ranks and the host has available {available}" in found.reason
    assert why_too_large(on_three, **has, host_ranks=2) is None
    assert why_too_large(on_two, **has, rank_memory_bytes=8 * count) is None
    assert why_too_large(on_two, **has, rank_memory_bytes=8 * count - 1) is not None
    found = why_too_large(offloading(world_size=(2,), host_memory_gib=7 * count / GIB))
    needed, allowed = fit.two_amounts(8 * count, 7 * count)
    assert found is not None
    assert f"need {needed} of host memory and --host-memory-gib allows {allowed}" in found.reason


def test_the_smallest_gpu_decides() -> None:
    sizes = (80, 30, 80, 80)
    gpus = [gpu.model_copy(update={"total_bytes": size << 30}) for gpu, size in zip(GPUS, sizes, strict=True)]
    row = configuration(**ON_GPUS, model=("gpt2-xl",), strategies=("zero0",))  # 23 GiB
    assert why_too_large(row, gpus=gpus) is None
    gpus[1] = gpus[1].model_copy(update={"total_bytes": 20 << 30})
    found = why_too_large(row, gpus=gpus)
    assert found is not None and found.tier == "device" and "GPU 1 has 20.00" in found.reason


def test_the_reference_leaves_a_gpu_room_for_activations() -> None:
    row = configuration(**ON_GPUS, model=("gpt2-xl",))
    count = row.settings.parameter_count or 0

    def layers(total_bytes: float) -> int:
        gpus = [gpu.model_copy(update={"total_bytes": int(total_bytes)}) for gpu in GPUS]
        return verification_model(row.model, gpus=gpus)["num_layers"]

    assert layers(20 * count / 0.89) == 48 and layers(20 * count / 0.91) == 24


def test_what_is_gathered_of_a_row_is_on_rank_0_three_times() -> None:
    row = configuration(**ON_GPUS, model=("gpt2-xl",))
    count = row.settings.parameter_count or 0
    for host_ranks in (4, 8):
        for share, layers in ((1.01, 48), (0.99, 24)):
            available = int(share * 4 * (host_ranks + 2) * count)
            found = verification_model(
                row.model, gpus=GPUS, host_ranks=host_ranks, memory_available_bytes=available
            )
            assert (found["num_layers"], host_ranks) == (layers, host_ranks)


def test_weights_of_all_layers_are_not_loaded_into_fewer() -> None:
    row = configuration(model=("hf:gpt2",))
    config = models.from_dict(row.model).model_copy(update={"weights": "/a/checkpoint"})
    assert config.with_layers(config.num_layers) is config
    fewer = config.with_layers(3)
    assert (fewer.num_layers, fewer.weights) == (3, RANDOM_WEIGHTS)


@pytest.mark.parametrize(
    ("more_bytes", "fewer_bytes", "expected"),
    [
        (23 << 30, 4 << 30, ("23.00 GiB", "4.00")),
        (3 << 30, 51 << 20, ("3072.00 MiB", "51.00")),
        (200 << 10, 100 << 10, ("0.20 MiB", "0.10")),
        ((4 << 30) + (1 << 20), 4 << 30, ("4097.00 MiB", "4096.00")),
        (20 << 10, 10 << 10, ("20.00 KiB", "10.00")),
        (500, 1, ("500 bytes", "1")),
    ],
)
def test_amounts_are_told_apart(more_bytes, fewer_bytes, expected) -> None:
    assert fit.two_amounts(more_bytes, fewer_bytes) == expected


def test_a_small_model_that_cannot_fit_has_figures() -> None:
    row = configuration(num_layers=(1,), hidden_size=(16,), strategies=("ddp",))
    reason = why_too_large(row, rank_memory_bytes=100 << 10)
    assert (
        reason is not None
        and "need 0.18 MiB on each rank" in reason.reason
        and "allows 0.10: not" in reason.reason
    )


def test_a_model_too_large_for_the_reference_is_verified_with_fewer_layers() -> None:
    row = configuration(model=("gpt2",))
    found = verification_model(row.model, rank_memory_bytes=3 << 30)
    assert 1 <= found["num_layers"] < 12
    assert {**found, "num_layers": 12} == row.model
    assert verification_model(configuration().model, rank_memory_bytes=3 << 30) == configuration().model
    assert verification_model(row.model, layers=5)["num_layers"] == 5
    assert verification_model(row.model, layers=50)["num_layers"] == 12


def test_what_all_ranks_of_a_row_gather_must_fit_the_host() -> None:
    row = configuration(**ON_GPUS, model=("gpt2-xl",))  # 1.56e9 parameters: 18.7 GB to 62 GB at 4 bytes each
    on_gpus = partial(verification_model, row.model, gpus=GPUS, memory_available_bytes=40 * 10**9)
    assert on_gpus() == row.model
    found = on_gpus(host_ranks=8)
    assert found["num_layers"] == 24


def test_what_cannot_fit_a_gpu_is_found_before_it_starts() -> None:
    small = [gpu.model_copy(update={"total_bytes": 8 << 30}) for gpu in GPUS]
    row = configuration(**ON_GPUS, model=("gpt2-xl",), strategies=("ddp",))
    reason = why_too_large(row, gpus=small)
    assert reason is not None and "GPU 0 has 8.00" in reason.reason
    assert why_too_large(row, gpus=GPUS) is None
    found = verification_model(row.model, gpus=small)
    assert 1 <= found["num_layers"] < 48


def test_few_tokens_an_expert_are_verified_with_all_experts_where_rounding_chooses_them() -> None:
    row = configuration(model=("mistralai/Mixtral-8x7B-v0.1",), model_option={"num_layers": 1})

    def experts(tokens: int | None) -> int:
        found = verification_model(row.model, rounded_tokens=tokens)
        return found["experts_per_token"]

    assert experts(None) == 2  # fp32
    assert experts(4095) == 8
    assert experts(4096) == 2  # 1024 an expert
    dense = configuration(model=("meta-llama/Meta-Llama-3-8B",), model_option={"num_layers": 1})
    found = verification_model(dense.model, rounded_tokens=1)
    assert found == dense.model


@pytest.mark.parametrize(
    ("precision", "tf32", "expected"), [("fp32", None, None), ("fp32", True, 1024), ("bf16", None, 1024)]
)
def test_experts_are_mistaken_where_products_are_rounded(precision, tf32, expected) -> None:
    settings = configuration().settings.model_copy(
        update={
            "precision": precision, "tf32": tf32, "world_size": 2, "grad_accum": 4, "batch_size": 2, "seq_length": 64
        }
    )  # fmt: skip
    assert jobs.rounded_tokens(settings) == expected


@pytest.mark.parametrize(
    ("strategy", "is_built_whole"),
    [("deepspeed3", True), ("fsdp1", True), ("zero3", False), ("fsdp2", False)],
)
def test_a_model_that_is_whole_before_it_is_sharded_must_fit_a_gpu(strategy, is_built_whole) -> None:
    eight = tuple(gpu.model_copy(update={"index": index}) for index, gpu in enumerate(GPUS * 2))
    on_eight = {**ON_GPUS, "gpus": eight, "world_size": (8,)}  # each of which holds an eighth of the state
    row = configuration(**on_eight, model=("gpt2-xl",), strategies=(strategy,))  # 5.8 GiB in fp32
    small = [gpu.model_copy(update={"total_bytes": 5 << 30}) for gpu in eight]
    reason = why_too_large(row, gpus=small)
    assert (reason is not None) == is_built_whole
    if reason is not None:
        assert reason.tier == "device"
        assert (
            f"{strategy} begins with the whole fp32 model on each rank, which needs 5.80 GiB" in reason.reason
        )
    assert why_too_large(row, gpus=GPUS) is None
