"""Peers with a switch that their rows leave as it is, as strategies of one's own, to see what each is worth:

PYTHONPATH=benchmarks python -m zerobench compare --model llama-1.3b --batch-size 4 --seq-length 2048 --precision bf16 \
    --strategies fsdp2,peer_switches:FSDP2Prefetch,mfsdp3,peer_switches:MegatronAverage,...
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerobench.strategies.base import ModelFactory
from zerobench.strategies.compiled import repeated_blocks
from zerobench.strategies.ddp import DDPMasterStrategy
from zerobench.strategies.deepspeed import DeepSpeed3Strategy
from zerobench.strategies.fsdp2 import FSDP2Strategy
from zerobench.strategies.megatron_fsdp import MegatronFSDP3Strategy
from zerobench.strategies.shared import merge


class FSDP2Prefetch(FSDP2Strategy):
    """Every block asks for the next one's parameters before its own forward and backward."""

    name = "fsdp2_prefetch"

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super()._wrap(model)
        blocks = [block for block in repeated_blocks(model) if isinstance(block, FSDPModule)]
        for first, second in itertools.pairwise(blocks):
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
        return wrapped


class DDPLargeBuckets(DDPMasterStrategy):
    """Buckets of 100 MiB instead of 25."""

    name = "ddp_large_buckets"

    def _wrap(self, model: nn.Module) -> nn.Module:
        from zerobench.strategies import ddp

        wrap = ddp.DistributedDataParallel
        ddp.DistributedDataParallel = partial(wrap, bucket_cap_mb=100)  # type: ignore[misc, assignment]
        try:
            return super()._wrap(model)
        finally:
            ddp.DistributedDataParallel = wrap  # type: ignore[misc]


class MegatronAverage(MegatronFSDP3Strategy):
    """Gradients are averaged by NCCL's collective, instead of scaled before it."""

    name = "mfsdp3_average"
    switches: dict[str, bool] = {"average_in_collective": True}  # noqa: RUF012

    def _wrap(self, model: nn.Module) -> nn.Module:
        import megatron_fsdp

        shard = megatron_fsdp.fully_shard_model
        megatron_fsdp.fully_shard_model = partial(shard, **self.switches)
        try:
            return super()._wrap(model)
        finally:
            megatron_fsdp.fully_shard_model = shard


class MegatronDoubleBuffer(MegatronAverage):
    """Units take turns in two persistent buffers."""

    name = "mfsdp3_double"
    switches = {"fsdp_double_buffer": True}  # noqa: RUF012


class DeepSpeedLeaves(DeepSpeed3Strategy):
    """Every block is gathered as one (DeepSpeed's leaf modules), instead of module by module."""

    name = "deepspeed3_leaves"

    def build(self, model_factory: ModelFactory) -> None:
        blocks = repeated_blocks(model_factory(device="meta"))
        classes = sorted({f"{type(block).__module__}.{type(block).__qualname__}" for block in blocks})
        leaves = {"zero_optimization": {"leaf_module": {"classes": classes}}}
        self.settings = replace(self.settings, options=merge(self.settings.options, leaves))
        super().build(model_factory)
