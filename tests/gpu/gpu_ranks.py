"""A rank with its device and a communicator of GPUs, for tests on real devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch

from zerobench import _native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GPU_NUM = torch.cuda.device_count()
# What may pass between a fault and the error, besides the communicator's own timeout: turns, graces, NCCL's abort.
SLACK_S = 20.0
KINDS = ("nccl", "peer")


def ordinal_of(rank: int) -> int:
    """Ranks beyond the machine's GPUs take turns on them, which "peer" allows where it is named."""
    return rank % GPU_NUM


def prepare(rank: ranks.Rank) -> str:
    """The rank's device, made the current one, and algorithms that give the same bits twice."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = f"cuda:{ordinal_of(rank.rank)}"
    torch.cuda.set_device(device)
    return device


def can_connect(kind: str, world_size: int) -> bool:
    return kind == "peer" or world_size <= GPU_NUM


def needs_gpus(kind: str, world_size: int) -> Any:
    """The marks of a test for so many ranks."""
    return pytest.mark.skipif(
        not can_connect(kind, world_size),
        reason=f"{kind} needs {world_size} GPUs, and this machine has {GPU_NUM}",
    )


class Connected:
    """A rank's device and its communicator, whose host messages go over shared memory."""

    def __init__(
        self,
        rank: ranks.Rank,
        *,
        kind: str,
        lane: str = "gather",
        timeout_s: float = 60.0,
        ordinal: int | None = None,
    ) -> None:
        self.core, cuda = _native.load(), _native.load_cuda()
        ordinal = ordinal_of(rank.rank) if ordinal is None else ordinal
        torch.cuda.set_device(ordinal)
        torch.cuda.init()
        self.lane = lane
        self.device = cuda.make_device(ordinal, on_out_of_memory=torch.cuda.empty_cache)
        self.device.set_compute_stream(torch.cuda.current_stream().cuda_stream)
        control = self.core.make_shm_communicator(
            rank=rank.rank,
            world_size=rank.world_size,
            rendezvous=f"{rank.meeting_point}-{lane}",
            timeout_s=timeout_s,
        )
        make = {"nccl": cuda.make_nccl_communicator, "peer": cuda.make_peer_communicator}[kind]
        self.comm = self.core.adopt_communicator(
            make(
                device=self.device,
                lane=lane,
                control=self.core.release_communicator(control),
                timeout_s=timeout_s,
            )
        )

    def buffer(self, numel: int, dtype: str) -> tuple[Any, torch.Tensor]:
        """One that peers may read, so all ranks make it."""
        held = self.comm.allocate(numel * DTYPES[dtype].itemsize, shared=True)
        return held, held.tensor(dtype)

    def ready(self) -> None:
        """Let the lane read what the compute stream has written."""
        self.device.wait(self.lane, self.device.mark("compute"))

    def run(self, start: Callable[[], Any]) -> None:
        """One collective between what the compute stream does before and after."""
        self.ready()
        start().wait()

    def gather(self, full: Any, shard_bytes: int) -> Any:
        """In place."""
        return self.comm.start_all_gather(
            full, full, shard_bytes=shard_bytes, source_offset_bytes=self.comm.rank * shard_bytes
        )


def values(rank: int, numel: int, dtype: str) -> torch.Tensor:
    """Whole numbers that tell ranks and places apart, whose sums over 8 ranks are exact in every dtype."""
    base = torch.arange(numel, device="cuda").remainder(7).add(1)
    return (base * (rank + 1)).to(DTYPES[dtype])


def sums(world_size: int, numel: int, dtype: str) -> torch.Tensor:
    return values(sum(rank + 1 for rank in range(world_size)) - 1, numel, dtype)
