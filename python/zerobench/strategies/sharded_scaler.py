"""The loss scale of fp16 where every rank holds another part of the gradients."""

from __future__ import annotations

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class FusedShardedGradScaler(ShardedGradScaler):
    """Ranks agree on an overflow in any shard, and fused Adam takes the answer: torch gives it as a vector of one
    element, which cannot be subtracted from the optimizer's scalar step counts (torch 2.11)."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)][
            "found_inf_per_device"
        ]
        for device in found:
            found[device] = found[device].reshape(())
