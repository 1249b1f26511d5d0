"""The grid of a pipeline's stages and their replicas, and the process groups of its rows and columns."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from zerobench.strategies.base import StrategySettings


class Groups:
    """This rank's place in the grid of stages and replicas. Ranks of a stage are neighbours, so that a pipeline, which
    sends the least, is what crosses hosts."""

    def __init__(self, settings: StrategySettings) -> None:
        stages = settings.pipeline_stages
        assert stages is not None
        self.stages, self.replicas = stages, settings.world_size // stages
        self.stage, self.replica = divmod(settings.rank, self.replicas)
        timeout = timedelta(seconds=settings.timeout_s)
        by_replica = [list(range(k, settings.world_size, self.replicas)) for k in range(self.replicas)]
        by_stage = [list(range(s * self.replicas, (s + 1) * self.replicas)) for s in range(stages)]
        # Every rank makes every group, in this order.
        pipelines = [dist.new_group(ranks, timeout=timeout) for ranks in by_replica]
        ends = [dist.new_group([ranks[0], ranks[-1]], timeout=timeout) for ranks in by_replica]
        copies = [dist.new_group(ranks, timeout=timeout) for ranks in by_stage]
        self.pipeline, self.ends = pipelines[self.replica], ends[self.replica]
        self.copies = copies[self.stage]
        self.ranks = by_replica[self.replica]  # of the pipeline, by stage

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of the pipeline's ranks, stacked."""
        gathered = tensor.new_empty((self.stages * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.pipeline)
        return gathered.view(self.stages, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor, *, stage: int) -> torch.Tensor:
        """Return ``tensor`` with what it holds on the rank of ``stage``."""
        dist.broadcast(tensor, src=self.ranks[stage], group=self.pipeline)
        return tensor
