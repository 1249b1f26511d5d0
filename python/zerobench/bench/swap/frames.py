"""The memory that a rank's state and parameters swap through, and the size of its chunks, for plans that are made
without the core. Imports no torch.

The same arithmetic as csrc/stores/host_store_memory.cpp, paged_state.cpp and paged_parameters.cpp: change both.
tests/unit/test_swap_plan.py holds it to what an engine takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerobench.host.io_settings import IoChoice

STATE_BYTES = 12  # of a parameter: fp32 master and two moments
CHUNK_NUMEL = 1 << 22  # where no budget is too small for it
_OUTGOING_NUM = 3  # buffers of a chunk, which stand before the frames
PAGE_BYTES = 4096  # of files
LINE_NUMEL = 64  # of which a chunk is a multiple
_COST_DIVISOR = 20  # of what a step moves where all swaps, what larger chunks may cost


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Memory of one pager. Chunks either all fit into it, or ``resident_num`` stay and the others pass through."""

    slot_bytes: int
    chunk_num: int
    frame_num: int  # for what swaps
    resident_num: int = 0

    @property
    def all_fit(self) -> bool:
        return self.chunk_num <= self.resident_num + self.frame_num

    @property
    def bytes(self) -> int:
        return self.slot_bytes * (self.chunk_num if self.all_fit else self.resident_num + self.frame_num)

    @property
    def swapped_share(self) -> float:
        return 0.0 if self.all_fit else 1 - self.resident_num / self.chunk_num

    def with_memory(self, bytes_: float) -> Frames:
        return replace(self, resident_num=int(bytes_ // self.slot_bytes))

    def with_more_frames(self, num: int) -> Frames:
        return replace(self, frame_num=self.frame_num + num)


@dataclass(frozen=True, kw_only=True)
class Swapping:
    """Parts of a rank that swap, and how they swap."""

    shards: Sequence[int]  # elements of each
    io: IoChoice
    path_num: int
    element_bytes: int  # of parameters and gradients
    pages_parameters: bool
    budget_bytes: float | None  # of host memory

    def outgoing_bytes(self, chunk_numel: int) -> int:
        return _OUTGOING_NUM * round_up(4 * min(max(self.shards), chunk_numel), PAGE_BYTES)

    def frames(self, chunk_numel: int) -> tuple[Frames, Frames | None]:
        """Return the frames of optimizer state, and those of parameters if these lie in files too, without any memory
        of the budget."""
        largest = min(max(self.shards), chunk_numel)
        chunk_num = sum(math.ceil(numel / chunk_numel) for numel in self.shards)

        def of(chunk_bytes: int, *, held_num: int) -> Frames:
            slot_bytes = self.path_num * round_up(math.ceil(chunk_bytes / self.path_num), PAGE_BYTES)
            frame_num = 2 * math.ceil(self.io.depth * self.io.block_bytes / slot_bytes) + held_num
            return Frames(slot_bytes=slot_bytes, chunk_num=chunk_num, frame_num=frame_num)

        state = of(3 * round_up(4 * largest, 64), held_num=2)
        parameters = of(self.element_bytes * largest, held_num=4) if self.pages_parameters else None
        return state, parameters

    def least_bytes(self, chunk_numel: int) -> int:
        """Return the bytes that cannot swap: gradients, buffers and frames."""
        frames = sum(each.bytes for each in self.frames(chunk_numel) if each is not None)
        return self.outgoing_bytes(chunk_numel) + frames + self.element_bytes * sum(self.shards)

    def frames_within_budget(self, chunk_numel: int) -> tuple[Frames, Frames | None]:
        """The same with what the budget keeps in memory, and with parameters that are read ahead."""
        state, parameters = self.frames(chunk_numel)
        ahead_num = math.ceil(max(self.shards) / chunk_numel)  # chunks of the largest shard
        if self.budget_bytes is None:
            return state, parameters and parameters.with_more_frames(ahead_num)
        left_bytes = max(0.0, self.budget_bytes - self.least_bytes(chunk_numel))
        if parameters is not None:
            slot_bytes, most_bytes = parameters.slot_bytes, parameters.chunk_num * parameters.slot_bytes
            ahead_bytes = min(left_bytes / 2, ahead_num * slot_bytes) if left_bytes < most_bytes else 0.0
            resident_bytes = min(left_bytes - ahead_bytes, most_bytes)
            parameters = parameters.with_more_frames(int(ahead_bytes // slot_bytes)).with_memory(
                resident_bytes
            )
            left_bytes -= resident_bytes + ahead_bytes
        return state.with_memory(left_bytes), parameters

    def least_chunk_numel(self, path_bytes: int) -> int:
        """Return the smallest chunk, in elements, of which every path still gets ``path_bytes`` bytes of the state, and
        of parameters if these lie in files."""
        smallest_bytes = self.element_bytes if self.pages_parameters else STATE_BYTES
        numel = CHUNK_NUMEL
        while numel > LINE_NUMEL and numel // 2 * smallest_bytes >= self.path_num * path_bytes:
            numel //= 2
        return numel

    def chosen_chunk_numel(self) -> int:
        """The largest size that fits into the budget and moves nearly as little as any; of less than whole requests
        only where no other fits."""
        if self.budget_bytes is None:
            return CHUNK_NUMEL
        request, least = (self.least_chunk_numel(bytes_) for bytes_ in (self.io.block_bytes, PAGE_BYTES))
        numel, moved = CHUNK_NUMEL, dict[int, float]()
        while numel >= (request if moved else least):
            if self.least_bytes(numel) <= self.budget_bytes:
                moved[numel] = self.moved_bytes(numel)
            numel //= 2
        if not moved:
            return least
        whole_bytes = sum(self.shards) * (
            2 * STATE_BYTES + (3 * self.element_bytes if self.pages_parameters else 0)
        )
        most_bytes = min(moved.values()) + whole_bytes / _COST_DIVISOR
        return next(numel for numel, bytes_ in moved.items() if bytes_ <= most_bytes)

    def moved_bytes(self, chunk_numel: int) -> float:
        """Return the bytes that a step moves: state is read and written, parameters are read twice and written."""
        state, parameters = self.frames_within_budget(chunk_numel)
        parameters_share = parameters.swapped_share if parameters is not None else 0.0
        return sum(self.shards) * (
            2 * STATE_BYTES * state.swapped_share + 3 * self.element_bytes * parameters_share
        )


def round_up(value: int, multiple: int) -> int:
    """The next multiple, or the value itself."""
    return -(-value // multiple) * multiple
