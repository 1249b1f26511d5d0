"""Peers with a switch that their rows leave as it is, as strategies of one's own, to see what each is worth:

PYTHONPATH=benchmarks python -m zerobench compare --model llama-1.3b --batch-size 4 --seq-length 2048 --precision bf16 \
    --strategies fsdp2,peer_switches:FSDP2Prefetch,mfsdp3,peer_switches:MegatronDoubleBuffer
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerobench.strategies.base import ModelFactory
from zerobench.strategies.compiled import repeated_blocks
from zerobench.strategies.ddp import DDPMasterStrategy
from zerobench.strategies.deepspeed.strategy import DeepSpeed3LeavesStrategy, DeepSpeed3Strategy
from zerobench.strategies.fsdp2 import FSDP2Strategy
from zerobench.strategies.megatron_fsdp import MegatronFSDP3Strategy


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


class FSDP2ReshardsHead(FSDP2Strategy):
    """The head's group is resharded after forward, and gathered again before backward."""

    name = "fsdp2_reshards_head"
    keeps_head = False


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


class MegatronDoubleBuffer(MegatronFSDP3Strategy):
    """Units take turns in two persistent buffers."""

    name = "mfsdp3_double"

    def _wrap(self, model: nn.Module) -> nn.Module:
        import megatron_fsdp

        shard = megatron_fsdp.fully_shard_model
        megatron_fsdp.fully_shard_model = partial(shard, fsdp_double_buffer=True)
        try:
            return super()._wrap(model)
        finally:
            megatron_fsdp.fully_shard_model = shard


def _plain_linear(strategy: DeepSpeed3Strategy) -> None:
    options = {"zero_optimization": {"memory_efficient_linear": False}}
    strategy.settings = dataclasses.replace(strategy.settings, options=options)


class DeepSpeedPlainLinear(DeepSpeed3Strategy):
    """torch's linear layers instead of DeepSpeed's autograd function, which gathers weights anew for backward."""

    name = "deepspeed3_plain_linear"

    def build(self, model_factory: ModelFactory) -> None:
        _plain_linear(self)
        super().build(model_factory)


class DeepSpeedLeavesPlainLinear(DeepSpeed3LeavesStrategy):
    name = "deepspeed3_leaves_plain_linear"

    def build(self, model_factory: ModelFactory) -> None:
        _plain_linear(self)
        super().build(model_factory)
