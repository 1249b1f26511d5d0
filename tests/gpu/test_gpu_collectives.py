"""Communicators of GPUs on real devices: every collective is exact, ordered and counted. One process a rank.

A group of processes takes seconds to connect, so checks that leave the communicator whole share one.
"""

from __future__ import annotations

import os
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
from gpu_ranks import (
    DTYPES,
    GPU_NUM,
    KINDS,
    SLACK_S,
    Connected,
    needs_gpus,
    sums,
    values,
)

from zerobench import _native
from zerobench.errors import StateError

RUNS = [
    pytest.param(world_size, kind, marks=needs_gpus(kind, world_size))
    for world_size in sorted({1, 2, GPU_NUM})
    for kind in KINDS
]
NUMELS = (1, 3, 31, 1000, 4097, 70_001)
SLOW_CYCLES = 300_000_000  # of torch.cuda._sleep: a tenth of a second or more


def check_all_gather(at: Connected, dtype: str, numel: int) -> None:
    size, ranks_ = numel * DTYPES[dtype].itemsize, at.comm.world_size
    expected = torch.cat([values(rank, numel, dtype) for rank in range(ranks_)])
    shard, shard_tensor = at.buffer(numel, dtype)
    full, full_tensor = at.buffer(numel * ranks_, dtype)
    shard_tensor.copy_(values(at.comm.rank, numel, dtype))
    at.run(lambda: at.comm.start_all_gather(shard, full, shard_bytes=size))
    assert torch.equal(full_tensor, expected)
    full_tensor.fill_(-1)
    full_tensor[at.comm.rank * numel :][:numel].copy_(shard_tensor)
    at.run(lambda: at.gather(full, size))
    assert torch.equal(full_tensor, expected)


def check_reduce_scatter(at: Connected, dtype: str, numel: int) -> None:
    ranks_, begin = at.comm.world_size, at.comm.rank * numel
    expected = sums(ranks_, numel * ranks_, dtype)[begin:][:numel]
    full, full_tensor = at.buffer(numel * ranks_, dtype)
    shard, shard_tensor = at.buffer(numel, dtype)
    full_tensor.copy_(values(at.comm.rank, numel * ranks_, dtype))
    at.run(lambda: at.comm.start_reduce_scatter(full, shard, shard_numel=numel, dtype=dtype))
    assert torch.equal(shard_tensor, expected)
    assert torch.equal(full_tensor, values(at.comm.rank, numel * ranks_, dtype))
    at.run(
        lambda: at.comm.start_reduce_scatter(
            full,
            full,
            shard_numel=numel,
            dtype=dtype,
            destination_offset_bytes=begin * DTYPES[dtype].itemsize,
        )
    )
    assert torch.equal(full_tensor[begin:][:numel], expected)


def check_all_reduce_and_broadcast(at: Connected, dtype: str, numel: int) -> None:
    ranks_ = at.comm.world_size
    buffer, tensor = at.buffer(numel, dtype)
    tensor.copy_(values(at.comm.rank, numel, dtype))
    at.run(lambda: at.comm.start_all_reduce(buffer, numel=numel, dtype=dtype))
    assert torch.equal(tensor, sums(ranks_, numel, dtype))
    tensor.copy_(values(at.comm.rank, numel, dtype))
    root = ranks_ - 1
    at.run(lambda: at.comm.start_broadcast(buffer, bytes=tensor.nbytes, root=root))
    assert torch.equal(tensor, values(root, numel, dtype))


def check_nothing_to_move(at: Connected) -> None:
    buffer, _ = at.buffer(1, "float32")
    at.run(lambda: at.comm.start_all_gather(buffer, buffer, shard_bytes=0))
    at.run(lambda: at.comm.start_reduce_scatter(buffer, buffer, shard_numel=0, dtype="bfloat16"))
    at.run(lambda: at.comm.start_all_reduce(buffer, numel=0, dtype="float32"))
    torch.cuda.synchronize()


def check_lane_order(at: Connected) -> None:
    """A kernel behind wait() reads what a slow lane gathers; one before it reads what was there."""
    numel = 1000
    full, tensor = at.buffer(numel * at.comm.world_size, "float32")
    shard, shard_tensor = at.buffer(numel, "float32")
    shard_tensor.copy_(values(at.comm.rank, numel, "float32"))
    tensor.fill_(-5)
    before, after = torch.empty_like(tensor), torch.empty_like(tensor)
    torch.cuda._sleep(1)  # loads the kernel
    at.ready()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(at.device.stream(at.lane))):
        torch.cuda._sleep(SLOW_CYCLES)
    begin = time.perf_counter()
    work = at.comm.start_all_gather(shard, full, shard_bytes=numel * 4)
    assert work.test()
    before.copy_(tensor)
    work.wait()
    after.copy_(tensor)
    host_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    total_s = time.perf_counter() - begin
    assert bool((before == -5).all())
    assert torch.equal(
        after, torch.cat([values(rank, numel, "float32") for rank in range(at.comm.world_size)])
    )
    assert host_s < total_s / 2, f"the host took {host_s:.3f} s of {total_s:.3f} s: something blocked it"


def check_group(at: Connected) -> None:
    ranks_, numel = at.comm.world_size, 513
    held = [at.buffer(numel * ranks_, "bfloat16") for _ in range(4)]
    summed, summed_tensor = at.buffer(numel, "float16")
    source, source_tensor = at.buffer(numel * ranks_, "float16")
    source_tensor.copy_(values(at.comm.rank, numel * ranks_, "float16"))
    for index, (_, tensor) in enumerate(held):
        tensor[at.comm.rank * numel :][:numel].fill_(10 * index + at.comm.rank)
    at.ready()
    at.comm.begin_group()
    works = [at.gather(buffer, numel * 2) for buffer, _ in held]
    works.append(at.comm.start_reduce_scatter(source, summed, shard_numel=numel, dtype="float16"))
    assert not works[0].test()
    with pytest.raises(StateError, match="group has ended"):
        works[0].wait()
    at.comm.end_group()
    for work in works:
        work.wait()
    for index, (_, tensor) in enumerate(held):
        expected = torch.arange(ranks_, device="cuda").add(10 * index).repeat_interleave(numel)
        assert torch.equal(tensor, expected.to(torch.bfloat16))
    assert torch.equal(summed_tensor, sums(ranks_, numel * ranks_, "float16")[at.comm.rank * numel :][:numel])


def check_counters_and_messages(at: Connected) -> None:
    ranks_ = at.comm.world_size
    before = at.comm.communication_bytes()
    full, _ = at.buffer(64 * ranks_, "float32")
    at.run(lambda: at.gather(full, 256))
    at.run(lambda: at.comm.start_all_reduce(full, numel=64, dtype="float32"))
    at.comm.barrier()
    message = bytes([at.comm.rank]) * 100
    assert at.comm.exchange(message) == b"".join(bytes([rank]) * 100 for rank in range(ranks_))
    after = at.comm.communication_bytes()
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    expected = {
        "all_gather": 256 * (ranks_ - 1),
        "all_reduce": 2 * 256 // ranks_ * (ranks_ - 1),
        "exchange": 100 * (ranks_ - 1),
    }
    assert moved == {name: size for name, size in expected.items() if size}


def check_two_lanes(at: Connected, other: Connected) -> None:
    """Gathers and reductions at the same time, each in its lane."""
    ranks_, numel = at.comm.world_size, 100_003
    full, full_tensor = at.buffer(numel * ranks_, "bfloat16")
    source, source_tensor = other.buffer(numel * ranks_, "bfloat16")
    shard, shard_tensor = other.buffer(numel, "bfloat16")
    source_tensor.copy_(values(at.comm.rank, numel * ranks_, "bfloat16"))
    full_tensor[at.comm.rank * numel :][:numel].copy_(values(at.comm.rank, numel, "bfloat16"))
    at.ready()
    other.ready()
    for _ in range(20):
        gathered = at.gather(full, numel * 2)
        reduced = other.comm.start_reduce_scatter(source, shard, shard_numel=numel, dtype="bfloat16")
    gathered.wait()
    reduced.wait()
    assert torch.equal(full_tensor, torch.cat([values(rank, numel, "bfloat16") for rank in range(ranks_)]))
    begin = at.comm.rank * numel
    assert torch.equal(shard_tensor, sums(ranks_, numel * ranks_, "bfloat16")[begin:][:numel])


def check_whole(rank: ranks.Rank, kind: str) -> None:
    at = Connected(rank, kind=kind)
    assert at.comm.kind == kind and at.comm.rank == rank.rank and at.comm.world_size == rank.world_size
    for dtype in DTYPES:
        for numel in NUMELS:
            check_all_gather(at, dtype, numel)
            check_reduce_scatter(at, dtype, numel)
            check_all_reduce_and_broadcast(at, dtype, numel)
    check_nothing_to_move(at)
    check_lane_order(at)
    check_group(at)
    check_counters_and_messages(at)
    other = Connected(rank, kind=kind, lane="reduce")
    check_two_lanes(at, other)
    begin = time.monotonic()
    at.comm.close()
    other.comm.close()
    assert time.monotonic() - begin < SLACK_S
    again = Connected(rank, kind=kind)  # after another one has ended
    check_all_gather(again, "float32", 1000)
    again.comm.close()


@pytest.mark.parametrize(("world_size", "kind"), RUNS)
def test_collectives_are_exact_ordered_and_counted(world_size: int, kind: str) -> None:
    ranks.run(check_whole, kind, world_size=world_size, timeout_s=200.0)


def check_over_gloo(rank: ranks.Rank, store: str) -> None:
    import torch.distributed as dist

    from zerobench.engine import config, topology

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, rank.world_size), rank=rank.rank, world_size=rank.world_size
    )
    core, cuda = _native.load(), _native.load_cuda()
    torch.cuda.set_device(rank.rank)
    device = cuda.make_device(rank.rank, on_out_of_memory=torch.cuda.empty_cache)
    # Each rank says that it is alone on its host, as ranks of several hosts do.
    parsed = config.parse(rank.config(local_rank=0, local_world_size=1, communicator="nccl"))
    place = topology.resolve(parsed, os.environ)
    made = topology.make_communicators(core, parsed, place, device, environment=os.environ)
    assert made.kind == made.gather.kind == made.reduce.kind == "nccl"
    device.set_compute_stream(torch.cuda.current_stream().cuda_stream)
    for comm, lane in ((made.gather, "gather"), (made.reduce, "reduce")):
        buffer = comm.allocate(4000, shared=True)
        tensor = buffer.tensor("float32").fill_(rank.rank + 1)
        device.wait(lane, device.mark("compute"))
        comm.start_all_reduce(buffer, numel=1000, dtype="float32").wait()
        assert bool((tensor == sum(range(rank.world_size + 1))).all())
        assert comm.exchange(b"%d" % rank.rank) == b"".join(b"%d" % peer for peer in range(rank.world_size))
        comm.close()
    made.close()


@needs_gpus("nccl", 2)
def test_ranks_of_several_hosts_meet_over_torch_distributed(tmp_path) -> None:
    ranks.run(check_over_gloo, str(tmp_path / "store"), world_size=2, timeout_s=120.0)
