"""Code that the ranks of `bench comm` run on CPU. torch is imported when a rank begins."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from zerobench.host.machine import cpus_usable
from zerobench.micro.comm_case import BARRIER, GLOO, LATENCY_BYTES, MEMCPY, SHM, CommOptions
from zerobench.micro.output import size_text
from zerobench.micro.ranks import Message, RankPlace, bind_crowded_rank
from zerobench.micro.sampling import calls_per_sample, rotated, seconds_per_repeat


def run_rank(
    place: RankPlace,
    send: Callable[[Message], None],
    *,
    cases: Sequence[tuple[str, int]],
    options: CommOptions,
) -> None:
    import torch
    import torch.distributed as dist

    from zerobench import _native
    from zerobench.host.meeting import expect_route

    core_num = cpus_usable()
    bind_crowded_rank(place)
    core = _native.load()
    torch.set_num_threads(max(1, core_num // place.world_size))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # Else gloo resolves the host's name, which laptops often cannot.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        expect_route("localhost", source="GLOO_SOCKET_IFNAME=lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(place.store_file, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=options.timeout_s),
    )
    comm = core.make_shm_communicator(
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        timeout_s=options.timeout_s,
    )
    for index, (collective, size_bytes) in enumerate(cases):
        message = measure_case(collective, size_bytes, comm, core, send, options.repeats, core_num=core_num)
        send({"case": index, **message})
    comm.barrier()
    dist.destroy_process_group()
    comm.close()


def measure_case(
    collective: str,
    size_bytes: int,
    comm: Any,
    core: Any,
    send: Callable[[Message], None],
    repeats: int,
    *,
    core_num: int,
) -> Message:
    from zerobench.micro import collectives

    case = collectives.Case(collective=collective, size_bytes=size_bytes, world_size=comm.world_size)
    sides: dict[str, collectives.Side] = {
        SHM: collectives.ShmSide(case, comm),
        GLOO: collectives.GlooSide(case),
    }
    if size_bytes > LATENCY_BYTES * comm.world_size:
        sides[MEMCPY] = collectives.MemcpySide(case, core, comm, core_num=core_num)
    wrong = {SHM: 0, GLOO: 0}
    check(case, sides, comm, wrong)
    if collective == "all_reduce":  # in place: sums of zeros stay what they are however often they are summed
        for side in (sides[SHM], sides[GLOO]):
            side.source.zero_()
    calls = {name: agreed_calls(comm, side.repeat) for name, side in sides.items()}
    what = f"{collective} {size_text(size_bytes)}" if size_bytes else collective
    tick = {"doing": what}
    if comm.rank == 0:
        send(tick)
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    # Copies need no other rank: without an end in common, each would be timed as if alone.
    ends = {MEMCPY: comm.barrier}
    for index in range(repeats):
        for name in rotated(list(sides), index):
            sides[name].repeat(1)  # the side before has left its own buffers in the caches
            comm.barrier()
            times_s[name].append(seconds_per_repeat(sides[name].repeat, calls[name], end=ends.get(name)))
        if comm.rank == 0:
            send(tick)
    check(case, sides, comm, wrong)
    message: Message = {"times_s": times_s, "calls": calls, "wrong": wrong}
    if collective != BARRIER:
        message["bus_factor"] = collectives.bus_factor(collective, comm.world_size)
        message["touched_bytes"] = collectives.touched_bytes(case)
        copied = sides[MEMCPY].copied_bytes if MEMCPY in sides else message["touched_bytes"]
        message["copied_bytes"] = copied
        message["limit_scale"] = message["touched_bytes"] / copied
    else:
        message["bus_factor"] = message["limit_scale"] = 1.0
    return message


def check(case: Any, sides: dict[str, Any], comm: Any, wrong: dict[str, int]) -> None:
    """Add each side's wrong elements after one run on known values."""
    from zerobench.micro import collectives

    if case.collective == BARRIER:
        return
    for name in (SHM, GLOO):
        comm.barrier()  # nobody reads these buffers any more
        collectives.fill(case, sides[name], comm.rank)
        comm.barrier()
        sides[name].repeat(1)
        wrong[name] += collectives.wrong_num(case, sides[name], comm.rank)
    comm.barrier()


def agreed_calls(comm: Any, repeat: Callable[[int], None]) -> int:
    """How many calls one sample takes: the same on all ranks, from the slowest one's best attempt."""
    repeat(1)
    comm.barrier()
    mine = min(seconds_per_repeat(repeat, 1) for _ in range(4))
    everyones = comm.exchange(struct.pack("d", mine))
    return calls_per_sample(max(struct.unpack(f"{comm.world_size}d", everyones)))
