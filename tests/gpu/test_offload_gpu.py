"""Optimizer state on the host or on NVMe, whole or in part, of engines on GPUs: the bits of state on the GPU.

One process a rank; all cases of a world size run in one group of processes. Where there are fewer GPUs than ranks, they
take turns on them.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
import zoo
from gpu_ranks import GPU_NUM, ordinal_of

import zerobench

HOST = {"chunk_numel": 128, "threads": 2}
NVME = zoo.SWAP | {"threads": 2, "io_checksums": True}
PLACEMENTS = {
    "none": {},
    "host": {"offload_optimizer": HOST},
    "half on the host": {"offload_optimizer": HOST | {"ratio": 0.5}},
    "parameters too": {"offload_optimizer": HOST, "offload_param": {}},
    "NVMe": {"offload_optimizer": NVME},
    "NVMe, what a budget leaves": {"offload_optimizer": NVME | {"host_memory_bytes": 200_000}},
    "NVMe, by threads": {"offload_optimizer": NVME | {"io_engine": "threads"}},
    "NVMe, parameters too": {"offload_optimizer": NVME, "offload_param": {"device": "nvme"}},
}
CASES = (
    "odd sizes",
    "clip",
    "bf16",
    "20 steps",
    "bf16 reduced in fp32",
    "fp16",
    "non-reentrant",
    "two forwards, two backwards",
)
WORLD_SIZES = (1, 2, 4)
KEYS = ("digest", "served", "norms", "scales", "applied", "losses")


def stages_of(placement: str, world_size: int) -> tuple[int, ...]:
    if placement.endswith("parameters too"):
        return (3,)
    if world_size > 1:
        return (1, 2, 3)
    return (2, 3) if placement == "none" else (2,)  # one rank has nothing to share at any stage


def cases_of(placement: str) -> tuple[str, ...]:
    return (
        ("clip", "20 steps", "fp16") if placement.startswith("NVMe") else CASES
    )  # each makes its files anew


def placements_on(path: str) -> dict[str, dict]:
    placements = {}
    for name, config in PLACEMENTS.items():
        offload = config.get("offload_optimizer", {})
        if offload.get("device") == "nvme":
            config = config | {"offload_optimizer": offload | {"nvme_path": [path, path]}}
        placements[name] = config
    return placements


def communicator_of(world_size: int) -> str:
    return "auto" if world_size <= GPU_NUM else "peer"


def train_all(rank: ranks.Rank, path: str) -> dict[tuple[str, str, int], dict]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = f"cuda:{ordinal_of(rank.rank)}"
    torch.cuda.set_device(device)
    connected = {"communicator": communicator_of(rank.world_size)}
    results = {}
    for placement, config in placements_on(path).items():
        for case in cases_of(placement):
            for stage in stages_of(placement, rank.world_size):
                found = zoo.train_or_error(
                    zoo.CASES[case], rank, stage=stage, device=device, **config, **connected
                )
                results[case, placement, stage] = {
                    key: found[key] if key == "error" else repr(found[key])
                    for key in (*KEYS, "error")
                    if key in found
                }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = {}
    path = str(tmp_path_factory.mktemp("disk"))

    def of(world_size):
        if world_size not in found:
            found[world_size] = ranks.run(train_all, path, world_size=world_size, timeout_s=300.0)
        return found[world_size]

    return of


class Stack(torch.nn.Sequential):
    """Block that becomes a unit."""


def fill_the_gpu(rank: ranks.Rank) -> dict[str, Any]:
    """Steps with all on the GPU, with all on the host, and on a GPU with room for half of the state."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank.rank)
    width, block_num = 1536, 4

    def train(offload: dict | None) -> tuple[Any, int]:
        torch.manual_seed(0)
        stacks = [
            Stack(*(torch.nn.Linear(width, width, bias=False) for _ in range(16))) for _ in range(block_num)
        ]
        model = torch.nn.Sequential(*stacks)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3**0.5)  # values keep their size through all layers
        engine = zerobench.initialize(
            model.cuda(),
            config=rank.config(stage=2, precision="bf16", offload_optimizer=offload, units=["Stack"]),
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for step in range(3):
            x = torch.randn(64, width, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            engine.backward(engine(x).float().square().mean())
            engine.step()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
        return engine, used

    found: dict[str, Any] = {"digests": []}
    limit = state = 0
    for offload in (None, {"threads": 2}, "auto"):
        if offload == "auto":
            limit = round((found["used"] + (256 << 20) + 0.5 * state) / 0.98)
            offload = {"threads": 2, "ratio": "auto", "device_memory_bytes": limit}
        engine, found["used"] = train(offload)
        state = 12 * sum(flat["shard_numel"] for unit in engine.units() for flat in unit["flats"])
        found["digests"].append(zoo.digest(engine.full_parameters()))
        found["ratio"], found["held"] = engine.offload_ratio, engine.memory_bytes(peak=False)
        engine.close()
        gc.collect()
        torch.cuda.empty_cache()
    return found | {"limit": limit, "state": state}


@pytest.mark.parametrize("world_size", [size for size in WORLD_SIZES if size <= GPU_NUM])
def test_auto_fills_the_gpu_within_its_limit(world_size):
    found = ranks.run(fill_the_gpu, world_size=world_size, timeout_s=120.0)
    assert len({rank["ratio"] for rank in found}) == 1
    for rank in found:
        assert len(set(rank["digests"])) == 1
        assert 0.3 < rank["ratio"] < 0.7, rank
        assert rank["used"] <= rank["limit"]
        assert rank["held"]["device"]["exp_avg"] > 0.25 * rank["state"] / 3
        assert rank["held"]["host"]["exp_avg"] > 0.25 * rank["state"] / 3


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("placement", "case"),
    [(name, case) for name in PLACEMENTS if name != "none" for case in cases_of(name)],
)
def test_ends_with_the_bits_of_state_on_the_gpu(results, world_size, case, placement):
    for rank in results(world_size):
        for stage in stages_of(placement, world_size):
            expected, found = rank[case, "none", stage], rank[case, placement, stage]
            assert "error" not in expected, expected["error"]
            assert "error" not in found, f"stage {stage}: {found['error']}"
            assert found == expected, f"stage {stage}"
