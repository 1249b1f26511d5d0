"""Optimizer state on the host or on NVMe, whole or in part, of engines on GPUs: the bits of state on the GPU.

One process a GPU; all cases of a world size run in one group of processes.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks  # noqa: E402
import zoo  # noqa: E402

HOST = {"chunk_numel": 128, "threads": 2}
# Many chunks of these small shards, few frames.
NVME = {
    "device": "nvme",
    "chunk_numel": 128,
    "threads": 2,
    "io_block_bytes": 4096,
    "io_depth": 1,
    "io_allow_fallback": True,
    "io_checksums": True,
}
PLACEMENTS = {
    "none": {},
    "host": {"offload_optimizer": HOST},
    "half on the host": {"offload_optimizer": HOST | {"ratio": 0.5}},
    "parameters too": {"offload_optimizer": HOST, "offload_param": {}},
    "NVMe": {"offload_optimizer": NVME},
    "NVMe, what a budget leaves": {"offload_optimizer": NVME | {"host_memory_bytes": 200_000}},
    "NVMe, by threads": {"offload_optimizer": NVME | {"io_engine": "threads"}},
}
CASES = (
    "odd sizes",
    "clip",
    "bf16",
    "bf16 reduced in fp32",
    "fp16",
    "non-reentrant",
    "two forwards, two backwards",
)
WORLD_SIZES = [world_size for world_size in (1, 2, 4) if torch.cuda.device_count() >= world_size]
KEYS = ("digest", "served", "norms", "scales", "applied", "losses")


def stages_of(placement: str, world_size: int) -> tuple[int, ...]:
    if placement == "parameters too":
        return (3,)
    if world_size > 1:
        return (1, 2, 3)
    return (2, 3) if placement == "none" else (2,)  # one rank has nothing to share at any stage


def placements_on(path: str) -> dict[str, dict]:
    placements = {}
    for name, config in PLACEMENTS.items():
        offload = config.get("offload_optimizer", {})
        if offload.get("device") == "nvme":
            config = config | {"offload_optimizer": offload | {"nvme_path": [path, path]}}
        placements[name] = config
    return placements


def train_all(rank: ranks.Rank, path: str) -> dict[tuple[str, str, int], dict]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank.rank)
    results = {}
    for case in CASES:
        for placement, config in placements_on(path).items():
            for stage in stages_of(placement, rank.world_size):
                try:
                    found = zoo.train_engine(
                        zoo.CASES[case], rank, stage=stage, device=f"cuda:{rank.rank}", **config
                    )
                    found = {key: repr(found[key]) for key in KEYS}
                except Exception:
                    found = {"error": traceback.format_exc()}
                results[case, placement, stage] = found
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


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "none"])
def test_ends_with_the_bits_of_state_on_the_gpu(results, world_size, case, placement):
    for rank in results(world_size):
        for stage in stages_of(placement, world_size):
            expected, found = rank[case, "none", stage], rank[case, placement, stage]
            assert "error" not in expected, expected["error"]
            assert "error" not in found, f"stage {stage}: {found['error']}"
            assert found == expected, f"stage {stage}"
