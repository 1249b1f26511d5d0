"""The collectives that `bench comm` measures: what each moves, how each side runs it, and how it is checked.

Sizes count as in nccl-tests: of the whole buffer on one rank, whatever the world size. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerobench.micro.ranks import core_of
from zerobench.micro.sampling import repeat

FLOAT_BYTES = 4
_PERIOD = 251  # prime and below 2^8: sums of so small integers are exact in float
_RANK_OFFSET = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective at one size."""

    collective: str
    size_bytes: int
    world_size: int

    @property
    def full_numel(self) -> int:
        return self.size_bytes // FLOAT_BYTES

    @property
    def shard_numel(self) -> int:
        return self.full_numel // self.world_size


class Side:
    """One implementation of a case: buffers with content, and a call that runs the collective so many times."""

    source: torch.Tensor
    destination: torch.Tensor
    repeat: Callable[[int], None]
    copied_bytes = 0  # read and written by a call that only copies


class ShmSide(Side):
    """zerobench's communicator over registered buffers, called without Python in between, as the engine calls it."""

    def __init__(self, case: Case, comm: Any) -> None:
        buffers: dict[str, Any] = {}
        if case.collective != "barrier":
            full, shard = case.size_bytes, case.size_bytes // case.world_size
            buffers["source"] = comm.allocate(shard if case.collective == "all_gather" else full, shared=True)
            self.source = self.destination = buffers["source"].tensor("float32")
            buffers["numel"] = case.full_numel if case.collective == "all_reduce" else case.shard_numel
        if case.collective in ("all_gather", "reduce_scatter"):
            buffers["destination"] = comm.allocate(
                full if case.collective == "all_gather" else shard, shared=False
            )
            self.destination = buffers["destination"].tensor("float32")
        self.repeat = lambda calls: comm.repeat(case.collective, calls, **buffers)


class GlooSide(Side):
    """torch.distributed over gloo, on plain tensors, called as a user calls it."""

    def __init__(self, case: Case) -> None:
        full, shard = torch.empty(case.full_numel), torch.empty(case.shard_numel)
        run: Callable[[], object]
        if case.collective == "barrier":
            run = dist.barrier
        elif case.collective == "all_reduce":
            self.source = self.destination = full
            run = partial(dist.all_reduce, full)
        elif case.collective == "all_gather":
            self.source, self.destination = shard, full
            run = partial(dist.all_gather_into_tensor, full, shard)
        else:
            self.source, self.destination = full, shard
            run = partial(dist.reduce_scatter_tensor, shard, full)
        self.repeat = partial(repeat, run)


class MemcpySide(Side):
    """The machine's limit: memcpy over the memory that the collective reads and writes, and nothing else.

    The buffers of all ranks lie in shared memory as the collective has them, so that the copies fetch the lines that
    the collective must fetch: those of other ranks, which for all_reduce have just been written by another core.
    all_gather and all_reduce copy from where they read to where they write. reduce_scatter, which reads more than it
    writes: one half of what it touches to the other. Where ranks share cores, one rank a core copies for all of its
    core, so that a call touches the whole working set and no switch of processes is in its time.
    """

    def __init__(self, case: Case, core: Any, comm: Any, *, core_num: int) -> None:
        buffer = comm.allocate(working_set_bytes(case), shared=True)
        blocks = [buffer.tensor("float32", rank=peer) for peer in range(case.world_size)]
        blocks[comm.rank].fill_(1.0)
        cores = [
            core_of(rank, world_size=case.world_size, core_num=core_num) for rank in range(case.world_size)
        ]
        neighbours = [rank for rank, core in enumerate(cores) if core == cores[comm.rank]]
        copied = neighbours if neighbours[0] == comm.rank else []
        pairs = [pair for rank in copied for pair in copies_of(case, blocks, rank)]
        destinations, sources = [to for to, _ in pairs], [source for _, source in pairs]
        self.copied_bytes = 2 * sum(source.nbytes for _, source in copies_of(case, blocks, comm.rank))
        self.repeat = lambda calls: core.memcpy_each(destinations, sources, calls)


def copies_of(
    case: Case, blocks: Sequence[torch.Tensor], rank: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) of what one rank copies in MemcpySide; `blocks` are the working sets of all ranks."""
    ranks, shard = case.world_size, case.shard_numel
    peers = [(rank + i) % ranks for i in range(ranks)]

    def slice_of(block: int, index: int) -> torch.Tensor:
        return blocks[block][index * shard :][:shard]

    if case.collective == "all_gather":  # a source of one shard, then the destination
        return [(slice_of(rank, 1 + peer), slice_of(peer, 0)) for peer in peers]
    if case.collective == "reduce_scatter":  # a source of n shards, then the destination
        touched = [slice_of(peer, rank) for peer in peers] + [slice_of(rank, ranks)]
        halves = [half for piece in touched for half in piece[: shard // 2 * 2].view(2, -1)]
        return list(zip(halves[: ranks + 1], halves[ranks + 1 :], strict=True))
    pairs = [(slice_of(rank, rank), slice_of(peer, rank)) for peer in peers[1:]]
    return pairs + [(slice_of(rank, peer), slice_of(peer, peer)) for peer in peers[1:]]


def working_set_bytes(case: Case) -> int:
    """Bytes of one rank's buffers: source and destination; one buffer for all_reduce, which works in place."""
    return case.size_bytes + (0 if case.collective == "all_reduce" else case.size_bytes // case.world_size)


def touched_bytes(case: Case) -> float:
    """Bytes that one rank must read and write. all_gather reads n shards and writes n; reduce_scatter reads its slice
    of n sources and writes one; all_reduce is a reduce_scatter in place, then a gather of the n - 1 other slices."""
    full, shard = case.size_bytes, case.size_bytes / case.world_size
    if case.collective == "all_gather":
        return 2 * full
    if case.collective == "reduce_scatter":
        return full + shard
    return full + shard + 2 * (full - shard)


def bus_factor(collective: str, world_size: int) -> float:
    """busbw over algbw, as nccl-tests derives it (doc/PERFORMANCE.md)."""
    factor = (world_size - 1) / world_size
    return 2 * factor if collective == "all_reduce" else factor


def pattern(numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32).remainder_(_PERIOD)


def fill(case: Case, side: Side, rank: int) -> None:
    """Small integers that tell ranks and places apart."""
    side.destination.fill_(-1.0)
    side.source.copy_(pattern(side.source.numel()).add_(_RANK_OFFSET * rank))


def wrong_num(case: Case, side: Side, rank: int) -> int:
    """Elements of the destination that are not exactly what the collective must give."""
    ranks = range(case.world_size)
    if case.collective == "all_gather":
        shards = side.destination.view(case.world_size, -1)
        base = pattern(case.shard_numel)
        return sum(int((shards[peer] != base + _RANK_OFFSET * peer).sum()) for peer in ranks)
    expected = pattern(case.full_numel).mul_(case.world_size).add_(_RANK_OFFSET * sum(ranks))
    if case.collective == "reduce_scatter":
        expected = expected.view(case.world_size, -1)[rank]
    return int((side.destination != expected).sum())
