"""Options of `bench comm` on CPU, and names that the command shares with its ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zerobench.engine.config import MAX_TIMEOUT_S
from zerobench.errors import ConfigError
from zerobench.host.machine import memory_available_bytes
from zerobench.micro.checks import check_known, check_repeats
from zerobench.micro.output import size_text

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LATENCY_BYTES = 8
BARRIER = "barrier"
SHM, GLOO, MEMCPY = "shm", "gloo", "memcpy"
# Both sides' buffers, the copy's and the temporaries of the check, per rank, over the size.
_RANK_MEMORY_FACTOR = 9


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """Collectives, sizes and world sizes to measure. Each size is four times the previous one."""

    world_sizes: Sequence[int]
    collectives: Sequence[str]
    min_bytes: int
    max_bytes: int
    repeats: int
    timeout_s: float

    def check(self) -> None:
        self.check_values()
        needed = max(self.world_sizes) * self.max_bytes * _RANK_MEMORY_FACTOR
        if needed > memory_available_bytes():
            raise ConfigError(
                f"--max-bytes {self.max_bytes} on {max(self.world_sizes)} ranks needs about {size_text(needed)}, and "
                f"{size_text(memory_available_bytes())} are available: give a smaller size"
            )

    def check_values(self) -> None:
        for world_size in self.world_sizes:
            if not 2 <= world_size <= 64:
                raise ConfigError(f"--world-size {world_size} is not valid: collectives need 2 to 64 ranks")
        check_known("--collectives", self.collectives, COLLECTIVES)
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                f"--min-bytes {self.min_bytes} and --max-bytes {self.max_bytes} are not a range: give 1 <= min <= max"
            )
        check_repeats(self.repeats)
        if not 1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"--timeout {self.timeout_s:g} is not valid: give 1 to {MAX_TIMEOUT_S:.0f} seconds"
            )

    def sizes(self) -> list[int]:
        sizes = [self.min_bytes]
        while sizes[-1] * 4 <= self.max_bytes:
            sizes.append(sizes[-1] * 4)
        return sizes

    def cases(self, world_size: int) -> list[tuple[str, int]]:
        """(collective, size in bytes), latencies first. Sizes are rounded up to whole floats on every rank."""
        line = 4 * world_size
        sizes = [-(-size // line) * line for size in (LATENCY_BYTES, *self.sizes())]
        return [(BARRIER, 0), *itertools.product(self.collectives, dict.fromkeys(sizes))]
