"""How much of a row's state swaps, and what memory io_uring locks for it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerobench import models
from zerobench.bench.swap.frames import LINE_NUMEL, PAGE_BYTES, STATE_BYTES, Frames, Swapping, round_up
from zerobench.host.io_settings import IoChoice, io_choice
from zerobench.results.sizes import GIB
from zerobench.strategies.catalogue import OURS

if TYPE_CHECKING:
    from zerobench.bench.plan.configuration import Configuration

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Approximate totals over all ranks of a host: what a step reads and writes, and the memory that io_uring locks for
    it."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0
    locked_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Memory of a rank that its state, and its parameters where they lie in files too, move through."""

    io: IoChoice
    chunk_numel: int
    outgoing_bytes: int
    state: Frames
    parameters: Frames | None
    gradient_bytes: int

    @property
    def frames(self) -> list[Frames]:
        return [self.state] if self.parameters is None else [self.state, self.parameters]

    @property
    def bytes(self) -> int:
        return self.outgoing_bytes + sum(each.bytes for each in self.frames) + self.gradient_bytes

    @property
    def locked_bytes(self) -> int:
        """About what io_uring locks of it, with rings of an engine before, which may not be gone yet."""
        locked = locked_bytes(self.frames, begin=self.outgoing_bytes, pool_bytes=self.bytes)
        return locked + 2 * len(self.frames) * ring_bytes(self.io.depth)


def may_swap(configuration: Configuration) -> bool:
    """Return whether a row can have state on NVMe as it asks, by its strategy's facts. Built-in strategies that cannot
    are skipped, and move nothing."""
    settings, facts = configuration.settings, configuration.facts
    return settings.offload in facts.nvme_offloads and settings.device in facts.devices


def swap_of(
    configuration: Configuration, *, host_ranks: int | None = None, settings_file: Path | None = None
) -> Swap | None:
    """Return what the row swaps, or None where the row itself finds out (ratio auto). ``host_ranks``: of this host,
    where others have some too. ``settings_file``: of what `tune io` found; the user's own by default."""
    settings = configuration.settings
    ranks = min(settings.world_size, host_ranks or settings.world_size)
    if settings.offload_ratio == "auto":
        return None
    element_bytes = 4 if settings.precision == "fp32" else 2
    if configuration.strategy not in OURS:
        numel = (settings.parameter_count or 0) * ranks / settings.world_size
        parameters_bytes = element_bytes * numel if settings.offload == "nvme_full" else 0.0
        return Swap(
            read_bytes=STATE_BYTES * numel + 2 * parameters_bytes,
            written_bytes=STATE_BYTES * numel + parameters_bytes,
        )
    numels = rank_numels(configuration)
    if not any(numels):
        return Swap()
    pool = pool_of(configuration, host_ranks=host_ranks, settings_file=settings_file)
    state_bytes = STATE_BYTES * sum(numels) * pool.state.swapped_share
    parameters_share = pool.parameters.swapped_share if pool.parameters else 0.0
    parameters_bytes = element_bytes * sum(numels) * parameters_share
    return Swap(
        read_bytes=ranks * (state_bytes + 2 * parameters_bytes),
        written_bytes=ranks * (state_bytes + parameters_bytes),
        locked_bytes=ranks * pool.locked_bytes,
    )


def rank_numels(configuration: Configuration) -> list[float]:
    """Return the elements of each unit that a rank keeps state of in files, about."""
    settings = configuration.settings
    share = 1.0 if settings.offload_ratio is None else float(settings.offload_ratio)
    return [share * numel / settings.world_size for numel in unit_numels(configuration)]


def pool_of(
    configuration: Configuration, *, host_ranks: int | None = None, settings_file: Path | None = None
) -> Pool:
    """Return the memory that a rank of our engine swaps through. Arguments are those of ``swap_of``."""
    settings, own = configuration.settings, configuration.options.get("offload_optimizer") or {}
    ranks = min(settings.world_size, host_ranks or settings.world_size)
    element_bytes = 4 if settings.precision == "fp32" else 2
    shards = [round_up(math.ceil(numel), LINE_NUMEL) for numel in rank_numels(configuration)]  # about
    budget_gib = settings.host_memory_gib
    io = io_choice(settings.nvme_paths, own, settings_file=settings_file)
    swapping = Swapping(
        shards=shards,
        io=io,
        path_num=len(settings.nvme_paths),
        element_bytes=element_bytes,
        pages_parameters=settings.offload == "nvme_full",
        budget_bytes=own.get("host_memory_bytes") or (budget_gib * GIB / ranks if budget_gib else None),
    )
    chunk_numel = own.get("chunk_numel") or swapping.chosen_chunk_numel()
    state, parameters = swapping.frames_within_budget(chunk_numel)
    return Pool(
        io=io,
        chunk_numel=chunk_numel,
        outgoing_bytes=swapping.outgoing_bytes(chunk_numel),
        state=state,
        parameters=parameters,
        gradient_bytes=element_bytes * sum(shards),
    )


def locked_bytes(frames: Sequence[Frames], *, begin: int, pool_bytes: int) -> int:
    """Return the bytes that the kernel charges for rings over such frames, one after the other in the pool. For each
    ring it charges every page that the ring touches; the pool's pages are huge except at its end."""
    huge_end = pool_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    charged = 0
    for each in frames:
        end = begin + each.bytes
        first = begin // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES if begin < huge_end else begin
        charged += (round_up(end, _HUGE_PAGE_BYTES) if end <= huge_end else end) - first
        begin = end
    return charged


def ring_bytes(depth: int) -> int:
    """Return the bytes of a ring itself: its requests (64 bytes each) and its two queues, which the kernel may charge
    too."""
    entry_num = 1 << depth.bit_length()  # the least power of two for one more than the depth
    return round_up(64 * entry_num, PAGE_BYTES) + round_up(36 * entry_num + 256, PAGE_BYTES)


def unit_numels(configuration: Configuration) -> list[int]:
    """Return the approximate number of elements of the root and of each block."""
    config = models.from_dict(configuration.model)
    count, layers = models.parameter_count(config), config.num_layers
    block = models.parameter_count(config.with_layers(layers + 1)) - count
    return [max(count - layers * block, 1), *[block] * (layers if block else 0)]
