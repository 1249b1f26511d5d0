"""The peer communicator on real devices: what other communicators of GPUs do not promise, or cannot get wrong. What all
have in common is tested in test_gpu_collectives.py and test_gpu_faults.py. One process a rank; on a machine of one GPU
two ranks take turns on it.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
from device_arrays import assert_same_bits, hard_values
from gpu_ranks import DTYPES, GPU_NUM, Connected, ordinal_of

from zerobench.bench.rank.intervals import is_communication
from zerobench.bench.rank.meters import device_activities, device_profiler
from zerobench.errors import CommunicationError

MIB = 2**20
two_gpus = pytest.mark.skipif(GPU_NUM < 2, reason=f"needs 2 GPUs, and this machine has {GPU_NUM}")


def values_of(rank: int, numel: int, dtype: str) -> torch.Tensor:
    """A rank's, which every rank can make."""
    return hard_values(numel, dtype, torch.Generator().manual_seed(1000 * numel + rank))


def summed(numel: int, dtype: str, world_size: int) -> torch.Tensor:
    """In rank order in float, rounded once."""
    total = values_of(0, numel, dtype).float()
    for rank in range(1, world_size):
        total = total + values_of(rank, numel, dtype).float()
    return total.to(DTYPES[dtype])


def check_sums(at: Connected, dtype: str, numel: int) -> None:
    """Bits of sums of any values, at any alignment."""
    world_size, begin = at.comm.world_size, at.comm.rank * numel
    full, tensor = at.buffer(numel * world_size + 1, dtype)
    shard, shard_tensor = at.buffer(numel + 2, dtype)
    expected = summed(numel * world_size, dtype, world_size)
    size = DTYPES[dtype].itemsize
    for source_shift, destination_shift in ((0, 0), (1, 0), (0, 2), (1, 1)):
        source = tensor[source_shift:][: numel * world_size]
        source.copy_(values_of(at.comm.rank, numel * world_size, dtype))
        at.run(
            lambda source_shift=source_shift, destination_shift=destination_shift: (
                at.comm.start_reduce_scatter(
                    full,
                    shard,
                    shard_numel=numel,
                    dtype=dtype,
                    source_offset_bytes=source_shift * size,
                    destination_offset_bytes=destination_shift * size,
                )
            )
        )
        got = shard_tensor[destination_shift:][:numel]
        assert_same_bits(got.cpu(), expected[begin:][:numel], f"reduce_scatter of {dtype}")
        at.run(
            lambda source_shift=source_shift: at.comm.start_all_reduce(
                full, numel=numel * world_size, dtype=dtype, offset_bytes=source_shift * size
            )
        )
        assert_same_bits(source.cpu(), expected, f"all_reduce of {dtype}")


def check_large(at: Connected) -> None:
    """More than the scratch of either lane holds at a time."""
    numel, world_size = 40 * MIB + 3, at.comm.world_size
    full, tensor = at.buffer(numel * world_size, "bfloat16")
    shard, shard_tensor = at.buffer(numel, "bfloat16")
    place = torch.arange(numel * world_size, device="cuda").remainder(61)
    tensor.copy_(place + at.comm.rank)
    at.run(lambda: at.comm.start_reduce_scatter(full, shard, shard_numel=numel, dtype="bfloat16"))
    ranks_sum = sum(range(world_size))
    expected = (place * world_size + ranks_sum).to(torch.bfloat16)
    assert torch.equal(shard_tensor, expected[at.comm.rank * numel :][:numel])
    tensor[at.comm.rank * numel :][:numel].copy_(shard_tensor)
    at.run(lambda: at.gather(full, numel * 2))
    assert torch.equal(tensor, expected)


def check_profiled(at: Connected) -> None:
    """Check that `compare` counts sums as communication in a profile, although they are kernels of ours."""
    numel = 4096
    full, _ = at.buffer(numel * at.comm.world_size, "bfloat16")
    shard, _ = at.buffer(numel, "bfloat16")
    with device_profiler() as profiler:
        at.run(lambda: at.comm.start_reduce_scatter(full, shard, shard_numel=numel, dtype="bfloat16"))
        torch.cuda.synchronize()
    names = {activity.name for activity in device_activities(profiler)}
    assert any("sum_kernel" in name and is_communication(name) for name in names), names


def check_private_source(at: Connected) -> None:
    private = at.comm.allocate(64, shared=False)
    full = at.comm.allocate(64 * at.comm.world_size, shared=False)
    with pytest.raises(ValueError, match="kShared"):
        at.comm.start_all_gather(private, full, shard_bytes=64)
    shared = at.comm.allocate(64, shared=True)
    at.run(lambda: at.comm.start_all_gather(shared, full, shard_bytes=64))  # only sources must be shared


def check_many(at: Connected) -> None:
    """More in flight than the device's queues hold, with the compute stream in between."""
    numel = 5000
    held = [at.buffer(numel * at.comm.world_size, "float32") for _ in range(4)]
    for step in range(300):
        full, tensor = held[step % len(held)]
        own = tensor[at.comm.rank * numel :][:numel]
        own.fill_(step + 1000 * at.comm.rank)
        at.run(lambda full=full: at.gather(full, numel * 4))
        if step % 50 != 49:
            continue
        expected = torch.arange(at.comm.world_size, device="cuda").mul(1000).add(step)
        assert torch.equal(tensor.view(-1, numel)[:, 7].long(), expected)


def check_bits(rank: ranks.Rank) -> None:
    for lane in ("gather", "reduce"):
        at = Connected(rank, kind="peer", lane=lane)
        for dtype in DTYPES:
            for numel in (1, 5, 4097, 300_001):
                check_sums(at, dtype, numel)
        check_large(at)
        check_profiled(at)
        check_private_source(at)
        check_many(at)
        at.comm.close()


@pytest.mark.parametrize("world_size", sorted({2, max(2, GPU_NUM)}))
def test_sums_have_the_bits_of_a_sum_in_rank_order(world_size: int) -> None:
    ranks.run(check_bits, world_size=world_size, timeout_s=200.0)


def differ_in_place(rank: ranks.Rank) -> str:
    at = Connected(rank, kind="peer")
    first, _ = at.buffer(64, "float32")
    second, _ = at.buffer(64, "float32")
    full, _ = at.buffer(64 * rank.world_size, "float32")
    at.comm.start_all_gather(first if rank.rank == 0 else second, full, shard_bytes=256)
    try:
        at.comm.barrier()
    except CommunicationError as error:
        return str(error)
    return "no CommunicationError"


def test_sources_in_different_places_are_noticed() -> None:
    for text in ranks.run(differ_in_place, world_size=2, timeout_s=60.0):
        assert "whose data lies in another place" in text


def allocate_differently(rank: ranks.Rank) -> str:
    at = Connected(rank, kind="peer")
    try:
        at.comm.allocate((rank.rank + 1) * 8 * MIB, shared=True)
    except CommunicationError as error:
        return str(error)
    return "no CommunicationError"


def test_ranks_that_allocate_differently_are_told_so() -> None:
    for text in ranks.run(allocate_differently, world_size=2, timeout_s=60.0):
        assert "ranks allocate different shared memory" in text


def run_out_of_memory(rank: ranks.Rank) -> str:
    at = Connected(rank, kind="peer")
    hog = None
    if rank.rank == 1:
        free_bytes, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free_bytes - 1024 * MIB, dtype=torch.uint8, device="cuda")
    try:
        at.comm.allocate(4096 * MIB, shared=True)
    except MemoryError as error:
        del hog
        at.comm.barrier()  # nobody is poisoned by it
        return str(error)
    return "no MemoryError"


@two_gpus
def test_a_rank_without_memory_is_named_on_all() -> None:
    for text in ranks.run(run_out_of_memory, world_size=2, timeout_s=60.0):
        assert text.startswith("rank 1: ") and "ran out of memory" in text


def forbid_queues(rank: ranks.Rank) -> str:
    import os

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    try:
        Connected(rank, kind="peer")
    except ValueError as error:
        return str(error)
    return "no ValueError"


def test_too_few_queues_are_refused() -> None:
    for text in ranks.run(forbid_queues, world_size=2, timeout_s=60.0):
        assert "communicator 'peer' cannot be used: on rank 0 CUDA_DEVICE_MAX_CONNECTIONS=1" in text


def choose(rank: ranks.Rank, connections: str | None, kind: str) -> tuple[str, str | None]:
    import os

    from zerobench import _native
    from zerobench.engine import config, topology

    if connections is not None and rank.rank == 1:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    torch.cuda.set_device(ordinal_of(rank.rank))
    torch.cuda.init()
    device = _native.load_cuda().make_device(ordinal_of(rank.rank), on_out_of_memory=torch.cuda.empty_cache)
    parsed = config.parse(rank.config(communicator=kind))
    place = topology.resolve(parsed, os.environ)
    made = topology.make_communicators(_native.load(), parsed, place, device, environment=os.environ)
    assert made.kind == made.gather.kind == made.reduce.kind
    made.gather.barrier()
    for comm in (made.gather, made.reduce):
        comm.close()
    made.close()
    return made.kind, made.note


@two_gpus
def test_auto_chooses_it_where_all_ranks_can_use_it() -> None:
    assert ranks.run(choose, None, "auto", world_size=2, timeout_s=60.0) == [("peer", None)] * 2
    for kind, note in ranks.run(choose, "1", "auto", world_size=2, timeout_s=60.0):
        assert kind == "nccl"
        assert note is not None and note.startswith("not peer: on rank 1 CUDA_DEVICE_MAX_CONNECTIONS=1")


def test_ranks_that_share_gpus_say_so_and_auto_refuses() -> None:
    num = GPU_NUM + 1
    gpus = "one GPU" if GPU_NUM == 1 else f"{GPU_NUM} GPUs"
    note = f"{num} ranks take turns on {gpus}, so their times say nothing"
    assert ranks.run(choose, None, "peer", world_size=num, timeout_s=60.0) == [("peer", note)] * num
    with pytest.raises(AssertionError, match=r"both use the GPU .* or name the communicator 'peer'"):
        ranks.run(choose, None, "auto", world_size=num, timeout_s=60.0)
