"""Plans of small rows, on CPU ranks and on GPUs."""

from __future__ import annotations

from functools import partial

from zerobench.bench.plan import fit
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.host.gpus import Gpu

SMALL = {"data": "synthetic", "strategies": ("zero0", "ddp"), "seq_length": (64,), "rounds": 0}
GPUS = tuple(
    Gpu(index=index, name="NVIDIA H200", uuid=str(index), total_bytes=140 << 30, compute_capability=(9, 0))
    for index in range(4)
)
HOST_BYTES = 256 << 30  # memory that the host has available
ON_GPUS = {"device": "cuda", "gpus": GPUS, "world_size": (4,), "precision": ("bf16",)}


def names(**options) -> list[str]:
    return [c.name for c in make_plan(CompareOptions(**{**SMALL, **options})).configurations]


def configuration(**options) -> Configuration:
    return make_plan(CompareOptions(**{**SMALL, **options})).configurations[0]


why_too_large = partial(fit.why_too_large, memory_available_bytes=HOST_BYTES, rank_memory_bytes=None)
verification_model = partial(
    fit.verification_model, memory_available_bytes=HOST_BYTES, rank_memory_bytes=None
)
