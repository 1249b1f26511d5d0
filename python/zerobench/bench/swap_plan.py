"""How much of a row's state swaps, and through what memory: as csrc/stores/host_store_memory.cpp and the paged stores
spend it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerobench import models
from zerobench.bench.fit import GIB, with_layers
from zerobench.bench.names import OURS
from zerobench.config import OffloadOptimizerConfig
from zerobench.io_settings import IoChoice, io_choice

if TYPE_CHECKING:
    from zerobench.bench.plan import Configuration

_STATE_BYTES = 12  # of a parameter: fp32 master and two moments
_OUTGOING_NUM = 3  # buffers of a chunk, which stand before the frames
_LINE_NUMEL = 64  # about what shards are padded to
_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Of all ranks of a host, about: what a step reads and writes, and the memory that io_uring locks for it."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0
    locked_bytes: float = 0.0


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


def swap_of(configuration: Configuration, *, host_ranks: int | None = None) -> Swap | None:
    """``host_ranks``: of this host, where others have some too. None where the row itself finds out (ratio auto)."""
    settings = configuration.settings
    ranks = min(settings.world_size, host_ranks or settings.world_size)
    if settings.offload_ratio == "auto":
        return None
    element_bytes = 4 if settings.precision == "fp32" else 2
    if configuration.strategy not in OURS:
        numel = (settings.parameter_count or 0) * ranks / settings.world_size
        parameters_bytes = element_bytes * numel if settings.offload == "nvme_full" else 0.0
        return Swap(
            read_bytes=_STATE_BYTES * numel + 2 * parameters_bytes,
            written_bytes=_STATE_BYTES * numel + parameters_bytes,
        )
    share = 1.0 if settings.offload_ratio is None else float(settings.offload_ratio)
    numels = [share * numel / settings.world_size for numel in unit_numels(configuration)]
    shards = [round_up(math.ceil(numel), _LINE_NUMEL) for numel in numels]
    if not share:
        return Swap()
    budget_gib = settings.host_memory_gib
    own = configuration.options.get("offload_optimizer") or {}
    io = io_choice(settings.nvme_paths, own)
    state, parameters = frames_of(
        shards,
        own=own,
        io=io,
        path_num=len(settings.nvme_paths),
        element_bytes=element_bytes,
        pages_parameters=settings.offload == "nvme_full",
        budget_bytes=own.get("host_memory_bytes") or (budget_gib * GIB / ranks if budget_gib else None),
    )
    outgoing_bytes = _OUTGOING_NUM * round_up(4 * min(max(shards), chunk_numel_of(own)), _PAGE_BYTES)
    frames = [frames for frames in (state, parameters) if frames is not None]
    pool_bytes = outgoing_bytes + sum(each.bytes for each in frames) + element_bytes * sum(shards)
    state_bytes = _STATE_BYTES * sum(numels) * state.swapped_share
    parameters_bytes = element_bytes * sum(numels) * parameters.swapped_share if parameters else 0.0
    return Swap(
        read_bytes=ranks * (state_bytes + 2 * parameters_bytes),
        written_bytes=ranks * (state_bytes + parameters_bytes),
        locked_bytes=ranks
        * (
            locked_bytes(frames, begin=outgoing_bytes, pool_bytes=pool_bytes)
            + 2 * len(frames) * ring_bytes(io.depth)  # those of an engine before may not be gone yet
        ),
    )


def frames_of(
    shards: Sequence[int],
    *,
    own: Mapping[str, Any],
    io: IoChoice,
    path_num: int,
    element_bytes: int,
    pages_parameters: bool,
    budget_bytes: float | None,
) -> tuple[Frames, Frames | None]:
    """Of optimizer state, and of parameters where they lie in files too."""
    chunk_numel = chunk_numel_of(own)
    largest = min(max(shards), chunk_numel)
    chunk_num = sum(math.ceil(numel / chunk_numel) for numel in shards)

    def frames(chunk_bytes: int, *, held_num: int) -> Frames:
        slot_bytes = path_num * round_up(math.ceil(chunk_bytes / path_num), _PAGE_BYTES)
        frame_num = 2 * math.ceil(io.depth * io.block_bytes / slot_bytes) + held_num
        return Frames(slot_bytes=slot_bytes, chunk_num=chunk_num, frame_num=frame_num)

    state = frames(3 * round_up(4 * largest, 64), held_num=2)
    parameters = frames(element_bytes * largest, held_num=4) if pages_parameters else None
    ahead_num = math.ceil(max(shards) / chunk_numel)  # chunks of the largest shard
    if budget_bytes is None:
        return state, parameters and parameters.with_more_frames(ahead_num)
    least_bytes = _OUTGOING_NUM * 4 * largest + state.bytes + element_bytes * sum(shards)
    left_bytes = max(0.0, budget_bytes - least_bytes - (parameters.bytes if parameters else 0))
    if parameters is not None:
        slot_bytes, most_bytes = parameters.slot_bytes, chunk_num * parameters.slot_bytes
        ahead_bytes = min(left_bytes / 2, ahead_num * slot_bytes) if left_bytes < most_bytes else 0.0
        resident_bytes = min(left_bytes - ahead_bytes, most_bytes)
        parameters = parameters.with_more_frames(int(ahead_bytes // slot_bytes)).with_memory(resident_bytes)
        left_bytes -= resident_bytes + ahead_bytes
    return state.with_memory(left_bytes), parameters


def locked_bytes(frames: Sequence[Frames], *, begin: int, pool_bytes: int) -> int:
    """What the kernel charges for rings over such frames, one behind the other in the pool: of each ring every page
    that it touches, and those of the pool are huge but for its end."""
    huge_end = pool_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    charged = 0
    for each in frames:
        end = begin + each.bytes
        first = begin // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES if begin < huge_end else begin
        charged += (round_up(end, _HUGE_PAGE_BYTES) if end <= huge_end else end) - first
        begin = end
    return charged


def ring_bytes(depth: int) -> int:
    """Of a ring itself, its requests (64 bytes each) and its two queues, which the kernel may charge too."""
    entry_num = 1 << depth.bit_length()  # the least power of two for one more than the depth
    return round_up(64 * entry_num, _PAGE_BYTES) + round_up(36 * entry_num + 256, _PAGE_BYTES)


def chunk_numel_of(own: Mapping[str, Any]) -> int:
    return own.get("chunk_numel") or OffloadOptimizerConfig.model_fields["chunk_numel"].default


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def unit_numels(configuration: Configuration) -> list[int]:
    """Of the root and each block, about."""
    config = models.ModelConfig.model_validate(configuration.model)
    count, layers = models.parameter_count(config), config.num_layers
    block = models.parameter_count(with_layers(config, layers + 1)) - count
    return [max(count - layers * block, 1), *[block] * layers]
