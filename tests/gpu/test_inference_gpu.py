"""Engines without trainable parameters on GPUs: the values of a plain model, and 7 billion parameters from the host."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
import zoo
from gpu_ranks import GPU_NUM, prepare
from small_models import Chain

import zerobench
from zerobench import models
from zerobench.models.materialise import materialise

TEACHER = "meta-llama/Llama-2-7b-hf"
LIMIT_BYTES = 20e9
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {}, "offload_param": {}},
    "nvme": {"offload_optimizer": zoo.SWAP, "offload_param": {"device": "nvme"}},
}


def placed(placement: str, path: str) -> dict[str, Any]:
    config = PLACEMENTS[placement]
    if placement != "nvme":
        return config
    return config | {"offload_optimizer": config["offload_optimizer"] | {"nvme_path": path}}


def on_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


def frozen() -> torch.nn.Module:
    torch.manual_seed(0)
    return Chain(4).requires_grad_(False)


def teach(rank: ranks.Rank, path: str) -> dict[str, list[float]]:
    """Return a frozen model's outputs and the gradients of its inputs, with a student of the same kind that trains."""
    device = prepare(rank)
    connected = {"communicator": "auto" if rank.world_size <= GPU_NUM else "peer"}
    found = {}
    for placement in ("plain", *PLACEMENTS):
        teacher: Any = frozen().to(device)
        if placement != "plain":
            teacher = zerobench.initialize(
                teacher, config=rank.config(stage=3, **connected, **placed(placement, path))
            )
        torch.manual_seed(1)
        student = zerobench.initialize(Chain(2).to(device), config=rank.config(stage=3, **connected))
        said: list[float] = []
        for step in range(4):
            batch = on_device(zoo.points(step, rank.rank), device)
            with (torch.no_grad, torch.inference_mode, contextlib.nullcontext)[step % 3]():
                target = float(teacher(**batch))
            x = batch["x"].clone().requires_grad_()
            teacher(x, batch["y"]).backward()
            loss = student(**batch) * target
            student.backward(loss)
            student.step()
            said += [target, float(x.grad.double().sum()), float(loss)]
        found[placement] = said
        student.close()
        if placement != "plain":
            teacher.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_teacher_says_what_the_plain_one_says(world_size, tmp_path):
    for found in ranks.run(teach, str(tmp_path), world_size=world_size, timeout_s=120.0):
        for placement in PLACEMENTS:
            assert found[placement] == pytest.approx(found["plain"], rel=1e-6), placement


def test_a_teacher_of_7_billion_parameters_runs_from_the_host():
    """Two forwards with the parameters in pinned host memory, which takes 13.5 GB there."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    used_before = total - free

    model = models.build(models.find(TEACHER, {"weights": "random"}), 0, device="meta")
    model.requires_grad_(False).eval()
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine = zerobench.initialize(
        model,
        config={
            "world_size": 1,
            "stage": 3,
            "precision": "bf16",
            "device": "cuda",
            "offload_optimizer": {},
            "offload_param": {},
        },
        materialise=materialise,
    )
    ids = torch.randint(0, 32000, (2, 512), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with torch.no_grad():
        first = engine(input_ids=ids).logits
        second = engine(input_ids=ids).logits
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    spare = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    used = total - free - used_before + spare
    held = engine.memory_bytes()
    engine.close()

    assert torch.isfinite(first).all() and torch.equal(first, second)
    assert first.float().std() > 0.1
    assert 2 * numel <= held["host"]["parameters"] <= 2 * numel * 1.001
    assert held["device"].get("parameters", 0) == 0
    assert used < LIMIT_BYTES, f"{used / 1e9:.1f} GB"
