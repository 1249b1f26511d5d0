"""Options of `bench comm` on GPUs, and names that the command shares with its ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zerobench.errors import ConfigError
from zerobench.host.gpus import Gpu
from zerobench.micro.checks import check_known
from zerobench.micro.comm_case import CommOptions
from zerobench.micro.output import size_text

OURS, TORCH = "zerobench", "torch"
COMMUNICATORS = ("nccl", "peer")
MAX_BYTES = 1 << 30
TIMED_DTYPE = "bfloat16"
SHARD_ALIGNMENT_BYTES = 16
# Both sides' buffers and the temporaries of the check, over the size.
_RANK_MEMORY_FACTOR = 12


@dataclass(frozen=True, kw_only=True)
class CommGpuOptions(CommOptions):
    """Collectives, sizes and world sizes to measure on GPUs. Each size is four times the previous one."""

    gpus: Sequence[Gpu]
    communicator: str = "nccl"  # of COMMUNICATORS
    symmetric: bool = False  # zerobench's buffers lie in NCCL's symmetric windows

    def check(self) -> None:
        self.check_values()
        check_known("--communicator", [self.communicator], COMMUNICATORS)
        if self.symmetric and self.communicator != "nccl":
            raise ConfigError("--symmetric uses NCCL's windows: remove one of --symmetric and --communicator")
        for world_size in self.world_sizes:
            if world_size > len(self.gpus):
                raise ConfigError(
                    f"--world-size {world_size} is more than the {len(self.gpus)} GPUs that torch sees here: give at "
                    "most one rank a GPU, or --device cpu"
                )
        smallest = min(self.gpus, key=lambda gpu: gpu.total_bytes)
        if self.max_bytes * _RANK_MEMORY_FACTOR > smallest.total_bytes:
            raise ConfigError(
                f"--max-bytes {self.max_bytes} needs about {size_text(self.max_bytes * _RANK_MEMORY_FACTOR)} on a GPU, "
                f"and {smallest.name} has {size_text(smallest.total_bytes)}: give a smaller size"
            )

    @property
    def side(self) -> str:
        """Name that tables give to zerobench's times."""
        return f"{self.communicator}, symmetric" if self.symmetric else self.communicator

    def cases(self, world_size: int) -> list[tuple[str, int]]:
        """(collective, size in bytes). Sizes are rounded up so that every shard is aligned."""
        line = SHARD_ALIGNMENT_BYTES * world_size
        sizes = dict.fromkeys(-(-size // line) * line for size in self.sizes())
        return list(itertools.product(self.collectives, sizes))
