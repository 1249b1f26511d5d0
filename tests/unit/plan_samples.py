"""Plans of small rows, on CPU ranks and on GPUs."""

from __future__ import annotations

from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import Configuration, make_plan
from zerobench.host.gpus import Gpu

SMALL = {"data": "synthetic", "strategies": ("zero0", "ddp"), "seq_length": (64,)}
GPUS = tuple(
    Gpu(index=index, name="NVIDIA H200", uuid=str(index), total_bytes=140 << 30, compute_capability=(9, 0))
    for index in range(4)
)
ON_GPUS = {"device": "cuda", "gpus": GPUS, "world_size": (4,), "precision": ("bf16",)}


def names(**options) -> list[str]:
    return [c.name for c in make_plan(CompareOptions(**{**SMALL, **options})).configurations]


def configuration(**options) -> Configuration:
    return make_plan(CompareOptions(**{**SMALL, **options})).configurations[0]
