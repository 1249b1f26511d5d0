"""Code that the ranks of `bench comm` run on GPUs. Imports torch; CUDA starts in run_rank."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerobench import _native
from zerobench.micro.collectives import bus_factor
from zerobench.micro.comm_gpu_case import OURS, TIMED_DTYPE, TORCH, CommGpuOptions
from zerobench.micro.output import size_text
from zerobench.micro.ranks import Message, RankPlace
from zerobench.micro.sampling import calls_per_sample, rotated, seconds_per_call

CHECKED_DTYPES = ("float32", TIMED_DTYPE)
_EXACT = 256  # whole numbers up to it are exact in bfloat16, and so are sums that stay below
_PERIOD = 251  # prime, so that places repeat in no shard in step


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One collective at one size."""

    collective: str
    size_bytes: int
    world_size: int
    rank: int

    @property
    def shard_bytes(self) -> int:
        return self.size_bytes // self.world_size

    @property
    def source_bytes(self) -> int:
        return self.shard_bytes if self.collective == "all_gather" else self.size_bytes

    @property
    def destination_bytes(self) -> int:
        return self.shard_bytes if self.collective == "reduce_scatter" else self.size_bytes


class Side:
    """One implementation of a case: buffers, and a call that puts the collective in once."""

    source: torch.Tensor  # bytes
    destination: torch.Tensor  # bytes; the source for all_reduce

    def call(self, dtype: str) -> Callable[[], object]:
        raise NotImplementedError


class OurSide(Side):
    """zerobench's communicator, over buffers as the engine's: peers read sources alone."""

    def __init__(self, case: GpuCase, comm: Any) -> None:
        self._case, self._comm = case, comm
        self._source = comm.allocate(case.source_bytes, shared=True)
        in_place = case.collective == "all_reduce"
        self._destination = self._source if in_place else comm.allocate(case.destination_bytes, shared=False)
        self.source, self.destination = (
            buffer.tensor("bfloat16").view(torch.uint8) for buffer in (self._source, self._destination)
        )

    def call(self, dtype: str) -> Callable[[], object]:
        case, comm, source, destination = self._case, self._comm, self._source, self._destination
        itemsize = getattr(torch, dtype).itemsize
        if case.collective == "all_gather":
            return lambda: comm.start_all_gather(source, destination, shard_bytes=case.shard_bytes)
        if case.collective == "reduce_scatter":
            numel = case.shard_bytes // itemsize
            return lambda: comm.start_reduce_scatter(source, destination, shard_numel=numel, dtype=dtype)
        return lambda: comm.start_all_reduce(source, numel=case.size_bytes // itemsize, dtype=dtype)


class TorchSide(Side):
    """torch.distributed over NCCL."""

    def __init__(self, case: GpuCase) -> None:
        self._collective = case.collective
        self.source = torch.empty(case.source_bytes, dtype=torch.uint8, device="cuda")
        self.destination = self.source
        if case.collective != "all_reduce":
            self.destination = torch.empty(case.destination_bytes, dtype=torch.uint8, device="cuda")

    def call(self, dtype: str) -> Callable[[], object]:
        source, destination = (
            tensor.view(getattr(torch, dtype)) for tensor in (self.source, self.destination)
        )
        if self._collective == "all_gather":
            return lambda: dist.all_gather_into_tensor(destination, source)
        if self._collective == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(destination, source)
        return lambda: dist.all_reduce(source)


def run_rank(
    place: RankPlace,
    send: Callable[[Message], None],
    *,
    cases: Sequence[tuple[str, int]],
    options: CommGpuOptions,
) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # before torch's communicator: NCCL reads it once
    torch.cuda.set_device(place.rank)
    timeout = timedelta(seconds=options.timeout_s)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(place.store_file, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=torch.device("cuda", place.rank),
    )
    comm = connect(place, options)
    for index, (collective, size_bytes) in enumerate(cases):
        case = GpuCase(
            collective=collective, size_bytes=size_bytes, world_size=place.world_size, rank=place.rank
        )
        send({"case": index, **measure_case(case, comm, send, options.repeats)})
    comm.barrier()
    comm.close()
    dist.destroy_process_group()


def connect(place: RankPlace, options: CommGpuOptions) -> Any:
    core, cuda = _native.load(), _native.load_cuda()
    device = cuda.make_device(place.rank, on_out_of_memory=torch.cuda.empty_cache)
    control = core.make_shm_communicator(
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        timeout_s=options.timeout_s,
    )
    given = {
        "device": device,
        "control": core.release_communicator(control),
        "timeout_s": options.timeout_s,
    }
    if options.communicator == "peer":  # the lane with the large scratch
        return core.adopt_communicator(cuda.make_peer_communicator(lane="reduce", **given))
    return core.adopt_communicator(
        cuda.make_nccl_communicator(lane="gather", symmetric=options.symmetric, **given)
    )


def measure_case(case: GpuCase, comm: Any, send: Callable[[Message], None], repeats: int) -> Message:
    sides: dict[str, Side] = {OURS: OurSide(case, comm), TORCH: TorchSide(case)}
    wrong = {name: wrong_num(case, side, comm) for name, side in sides.items()}
    for side in sides.values():  # sums of zeros stay what they are however often they are summed in place
        side.source.zero_()
    runs = {name: side.call(TIMED_DTYPE) for name, side in sides.items()}
    calls = {name: agreed_calls(comm, run) for name, run in runs.items()}
    tick = {"doing": f"{case.collective} {size_text(case.size_bytes)}"}
    if case.rank == 0:
        send(tick)
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(repeats):
        for name in rotated(list(sides), index):
            times_s[name].append(sample_s(comm, runs[name], calls[name]))
        if case.rank == 0:
            send(tick)
    for name, side in sides.items():
        wrong[name] += wrong_num(case, side, comm)
    return {
        "times_s": times_s,
        "calls": calls,
        "wrong": wrong,
        "bus_factor": bus_factor(case.collective, case.world_size),
    }


def sample_s(comm: Any, run: Callable[[], object], call_num: int) -> float:
    """Seconds a call. One call before them takes up what the ranks are apart."""
    run()
    torch.cuda.synchronize()
    comm.barrier()
    return seconds_per_call(run, call_num, end=torch.cuda.synchronize)


def agreed_calls(comm: Any, run: Callable[[], object]) -> int:
    """How many calls one sample takes: the same on all ranks, from the slowest one's best attempt."""
    mine = min(sample_s(comm, run, 4) for _ in range(3))
    everyones = comm.exchange(struct.pack("d", mine))
    return calls_per_sample(max(struct.unpack(f"{comm.world_size}d", everyones)))


def wrong_num(case: GpuCase, side: Side, comm: Any) -> int:
    """Elements of the destination that are not exactly what the collective must give."""
    wrong = 0
    for dtype in CHECKED_DTYPES:
        source, destination = (
            tensor.view(getattr(torch, dtype)) for tensor in (side.source, side.destination)
        )
        comm.barrier()  # nobody reads these buffers any more
        destination.fill_(-1)
        source.copy_(values(case, case.rank, source.numel()))
        torch.cuda.synchronize()
        comm.barrier()
        side.call(dtype)()
        torch.cuda.synchronize()
        wrong += sum(int((part != expected).sum()) for part, expected in expectations(case, destination))
    return wrong


def values(case: GpuCase, rank: int, numel: int) -> torch.Tensor:
    """Small whole numbers that tell ranks and places apart."""
    places = torch.arange(numel, dtype=torch.int32, device="cuda")
    if case.collective == "all_gather":
        return places.add_(83 * rank).remainder_(_PERIOD)
    return places.remainder_(_PERIOD).add_(rank).remainder_(_EXACT // case.world_size)


def expectations(case: GpuCase, destination: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what came and what must have come."""
    ranks = range(case.world_size)
    if case.collective == "all_gather":
        shards = destination.view(case.world_size, -1)
        return [(shards[rank], values(case, rank, shards.shape[1])) for rank in ranks]
    shard_num = case.world_size if case.collective == "reduce_scatter" else 1
    total = values(case, 0, destination.numel() * shard_num)
    for rank in ranks[1:]:
        total += values(case, rank, total.numel())
    if case.collective == "reduce_scatter":
        total = total.view(case.world_size, -1)[case.rank]
    return [(destination, total)]
