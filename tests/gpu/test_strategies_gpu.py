"""Every strategy on GPUs: it trains what the single-process reference trains, its readers work, and it closes and can
be built again in the same process, as a comparison's two passes do.

A test is one strategy in fresh processes, one a GPU, that are killed when its time is over.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
from builders import make_settings, tiny_model

from zerobench import strategies
from zerobench.bench.launch.environments import free_ports
from zerobench.bench.rank.reads import watched
from zerobench.strategies.base import StrategySettings
from zerobench.strategies.peer import PeerStrategy

GPU_NUM = torch.cuda.device_count()
NUM_STEPS = 4
BATCH_SIZE = 2
SEQ_LENGTH = 64
MODEL = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "max_seq_length": SEQ_LENGTH}
build_model = partial(tiny_model, **MODEL)
OURS = ["zero0", "zero1", "zero2", "zero3"]
TORCHS = ["ddp", "ddp_compress", "ddp_master", "fsdp1", "fsdp2", "fsdp2_keep"]
DEEPSPEED = ["deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3_leaves"]
MEGATRON = ["mfsdp1", "mfsdp2", "mfsdp3"]
TRAINERS = [*OURS, *TORCHS, *DEEPSPEED, *MEGATRON]
BUILT_AT_FIRST_USE = [  # a minute or two of nvcc each
    "deepspeed0",
    "deepcompile3",
    "deepcompile3_prefetch",
    "deepcompile3_selective",
    "deepcompile3_both",
]
TIMEOUT_S = 150.0
LONG_TIMEOUT_S = 420.0
# Relative: the loss and the norm of step 1, its gradients, and the updates after all steps.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-3, "update": 5e-3},
    "bf16": {"loss": 5e-3, "norm": 0.02, "gradient": 0.05, "update": 0.15},
    "fp16": {"loss": 1e-3, "norm": 5e-3, "gradient": 0.01, "update": 0.05},
}
pytestmark = pytest.mark.timeout(LONG_TIMEOUT_S + 60)


def gpu_settings(**fields: Any) -> StrategySettings:
    defaults = {
        "rendezvous": f"test-strategies-gpu-{os.environ.get('MASTER_PORT', 0)}",
        "precision": "bf16",
        "batch_size": BATCH_SIZE,
        "seq_length": SEQ_LENGTH,
        "timeout_s": 60.0,
        "device": "cuda",
    }
    return make_settings(**{**defaults, **fields})


def micro_batches(
    step: int, *, rank: int, world_size: int, grad_accum: int, device: torch.device
) -> list[dict]:
    """This rank's; a world of one rank that accumulates as often as all ranks together sees the same data."""
    first = (step * world_size + rank) * grad_accum
    found = []
    for index in range(first, first + grad_accum):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(256, (BATCH_SIZE, SEQ_LENGTH), generator=generator).to(device)
        found.append({"input_ids": ids, "labels": ids})
    return found


def applied_step(strategy, batches):
    """Steps that fp16 overflow skips are made again."""
    for _ in range(20):
        result = strategy.step(batches, norm=True)
        if result.applied is not False or not strategy.updates:
            return result
    raise AssertionError("overflowed at every loss scale")


def batches_of(strategy, step: int) -> list[dict]:
    settings = strategy.settings
    return micro_batches(
        step,
        rank=settings.rank,
        world_size=settings.world_size,
        grad_accum=settings.grad_accum,
        device=torch.device(settings.device, settings.rank if settings.device == "cuda" else 0),
    )


Found = dict[str, Any]


def checked_pass(name: str, place: dict[str, Any]) -> Found:
    """Deterministic, with what is compared."""
    strategy = strategies.get(name)(gpu_settings(deterministic=True, **place))
    strategy.build(build_model)
    found: Found = {"initial": strategy.full_parameters(), "dtypes": strategy.dtypes()}
    first = applied_step(strategy, batches_of(strategy, 0))
    found["loss"] = float(first.loss)
    found["norm"] = None if first.grad_norm is None else float(first.grad_norm)
    found["moments"] = strategy.first_moments()
    for step in range(1, NUM_STEPS):
        applied_step(strategy, batches_of(strategy, step))
    found["parameters"] = strategy.full_parameters()
    module = strategy.module()
    with nullcontext() if module is None else watched(module, found["parameters"]) as reads:
        found["evaluated"] = strategy.evaluate(batches_of(strategy, 100)[:1])
    if reads is not None:
        found["read"], found["read names"] = reads.worst(), reads.names
    strategy.close()
    return found


def timed_pass(name: str, place: dict[str, Any]) -> Found:
    """As users train."""
    strategy = strategies.get(name)(gpu_settings(**place))
    strategy.build(build_model)
    strategy.step(batches_of(strategy, 0))
    strategy.reset_counters()
    found: Found = {}
    found["losses"] = [float(strategy.step(batches_of(strategy, step)).loss) for step in range(1, NUM_STEPS)]
    found["graphs"] = strategy.compiled_graphs()
    found["memory"] = strategy.memory_bytes()["device"]
    found["communication_bytes"] = strategy.communication_bytes()
    if isinstance(strategy, PeerStrategy):
        found["recorded_bytes"] = PeerStrategy.communication_bytes(strategy)
    found["is_ours"] = name in OURS
    found["communicator"] = strategy.communicator()
    found["validation_loss"] = strategy.evaluate(batches_of(strategy, 100))
    found["phases_ms"] = dict(strategy.profiled_step(batches_of(strategy, NUM_STEPS)))
    found["loss after profile"] = float(strategy.step(batches_of(strategy, NUM_STEPS + 1)).loss)
    strategy.close()
    return found


PASSES = (checked_pass, timed_pass)


def train(
    rank: ranks.Rank, name: str, ports: list[int], device: str, fields: dict[str, Any], passes: tuple
) -> Found:
    """One pass after the other, each with a strategy of its own."""
    place = {"rank": rank.rank, "world_size": rank.world_size, "device": device, **fields}
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.rank),
        LOCAL_WORLD_SIZE=str(rank.world_size),
    )
    found: Found = {}
    for run_pass, port in zip(passes, ports, strict=False):
        os.environ["MASTER_PORT"] = str(port)
        found |= run_pass(name, place)
    return found


def run(
    name: str, *, world_size: int, device: str = "cuda", timeout_s: float = TIMEOUT_S, **fields: Any
) -> list[dict]:
    """Return results by rank. Skip with the strategy's own reason."""
    if device == "cuda" and world_size > GPU_NUM:
        pytest.skip(f"needs {world_size} GPUs, and this machine has {GPU_NUM}")
    reason = strategies.get(name).unsupported(
        gpu_settings(rank=0, world_size=world_size, device=device, **fields)
    )
    if reason is not None:
        pytest.skip(reason)
    # Megatron-FSDP's meshes crash in a process whose first process group was destroyed; comparisons give each pass
    # processes of its own.
    groups = [(run_pass,) for run_pass in PASSES] if name in MEGATRON else [PASSES]
    found: list[Found] = [{} for _ in range(world_size)]
    for passes in groups:
        size = {"world_size": world_size, "timeout_s": timeout_s}
        by_rank = ranks.run(train, name, free_ports(len(passes)), device, fields, passes, **size)
        found = [{**earlier, **later} for earlier, later in zip(found, by_rank, strict=True)]
    return found


@cache
def reference(
    num_ranks: int, precision: str, clip: float | None, grad_accum: int, device: str = "cuda"
) -> dict[str, Any]:
    """One process that trains all ranks' micro-batches."""
    return run(
        "single",
        world_size=1,
        device=device,
        precision=precision,
        clip=clip,
        grad_accum=num_ranks * grad_accum,
    )[0]


def relative(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    difference = sum((found[name] - expected[name]).double().square().sum() for name in expected)
    return float((difference / sum(tensor.double().square().sum() for tensor in expected.values())).sqrt())


def moved(result: dict) -> dict:
    return {name: result["parameters"][name] - result["initial"][name] for name in result["initial"]}


def check(by_rank: list[dict], expected: dict, *, precision: str = "bf16") -> None:
    first, size = by_rank[0], len(by_rank)
    errors = {
        "loss": abs(sum(found["loss"] for found in by_rank) / size / expected["loss"] - 1),
        "norm": abs(first["norm"] / expected["norm"] - 1),
        "gradient": relative(first["moments"], expected["moments"]),
        "update": relative(moved(first), moved(expected)),
    }
    tolerances = TOLERANCES[precision]
    assert all(errors[key] <= tolerances[key] for key in tolerances), errors
    assert relative(first["initial"], expected["initial"]) == 0
    for found in by_rank:
        assert relative(found["parameters"], first["parameters"]) == 0  # readers give every rank the same
        if found["evaluated"] is not None:
            assert found["read"].share == 0.0, found["read"]
            assert found["read names"] == found["parameters"].keys()
        check_facts(found, size)


def check_facts(found: dict, size: int) -> None:
    """Check the results of the pass without checks."""
    assert all(0 < loss < 7 for loss in (*found["losses"], found["loss after profile"])), found["losses"]
    assert found["validation_loss"] is None or 0 < found["validation_loss"] < 7
    assert {"parameters", "gradients", "master", "exp_avg", "exp_avg_sq"} <= found["memory"].keys()
    assert all(
        found["memory"][category] > 0 for category in ("parameters", "gradients", "exp_avg", "exp_avg_sq")
    )
    assert found["phases_ms"].keys() >= {"forward", "backward", "optimizer"}
    assert all(found["phases_ms"][phase] > 0 for phase in ("forward", "backward", "optimizer"))
    if size == 1:
        assert found["communicator"] is None
    elif found["is_ours"]:
        assert found["communicator"].startswith(("peer", "nccl; not peer: "))
    else:
        assert found["communicator"] == "nccl"
    if found["communication_bytes"] is not None:
        assert (sum(found["communication_bytes"].values()) > 0) == (size > 1)
    if size > 1 and "recorded_bytes" in found:  # what torch recorded, beside a peer's own count
        assert found["recorded_bytes"] == found["communication_bytes"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", TRAINERS)
def test_trains_as_the_reference(name, world_size):
    check(run(name, world_size=world_size), reference(world_size, "bf16", None, 1))


@pytest.mark.parametrize("name", BUILT_AT_FIRST_USE)
def test_trains_as_the_reference_with_operators_built_at_first_use(name):
    world_size = min(2, GPU_NUM)
    found = run(name, world_size=world_size, timeout_s=LONG_TIMEOUT_S)
    check(found, reference(world_size, "bf16", None, 1))


@pytest.mark.parametrize("name", [*OURS, "ddp", "ddp_compress", "fsdp1", "fsdp2", *DEEPSPEED])
def test_fp16_scales_its_loss_clips_and_accumulates(name):
    world_size = min(2, GPU_NUM)
    fields = {"precision": "fp16", "clip": 0.5, "grad_accum": 2}
    check(run(name, world_size=world_size, **fields), reference(world_size, "fp16", 0.5, 2), precision="fp16")


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_clips_and_accumulates(name):
    world_size = min(2, GPU_NUM)
    found = run(name, world_size=world_size, clip=0.5, grad_accum=2)
    check(found, reference(world_size, "bf16", 0.5, 2))


@pytest.mark.parametrize(
    ("name", "mode", "graphs"),
    [
        ("single", "block", 2),
        ("zero1", "block", 2),
        ("zero3", "block", 2),
        ("zero0", "whole", 1),
        ("zero1", "whole", 1),
        ("zero2", "whole", 1),
        ("fsdp2", "block", 2),
        ("ddp", "block", 2),
        ("ddp", "whole", 1),
        ("deepspeed1", "whole", 1),
        ("mfsdp3", "block", 2),
        ("fsdp1", "block", 2),
        ("deepspeed3_leaves", "block", 2),
        ("deepspeed3", "whole", None),
    ],
)
def test_compiled(name, mode, graphs):
    world_size = 1 if name == "single" else min(2, GPU_NUM)
    by_rank = run(name, world_size=world_size, compile=mode, timeout_s=LONG_TIMEOUT_S)
    if graphs is None:  # cut at every module by its hooks
        assert all(found["graphs"] > 1 for found in by_rank)
    else:
        assert [found["graphs"] for found in by_rank] == [graphs] * world_size
    check(by_rank, reference(world_size, "bf16", None, 1))


def test_compute_only_moves_nothing_and_changes_nothing():
    for found in run("compute_only", world_size=min(2, GPU_NUM)):
        assert relative(found["parameters"], found["initial"]) == 0
        assert found["loss"] == pytest.approx(reference(1, "bf16", None, 1)["loss"], rel=0.02)
        assert (found["memory"]["exp_avg"], found["communication_bytes"], found["communicator"]) == (
            0,
            {},
            None,
        )
        assert found["phases_ms"]["backward"] > 0
