"""Faults of communicators of GPUs on real devices: every rank ends in time and says why. A rank is a process, killed
when it hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
from gpu_ranks import GPU_NUM, KINDS, SLACK_S, Connected, needs_gpus

from zerobench.errors import CommunicationError

RANK_NUM = max(2, GPU_NUM)
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_gpus(kind, RANK_NUM)) for kind in KINDS]
)


def warm(at: Connected) -> tuple[Any, int]:
    """A buffer that was gathered once."""
    full, tensor = at.buffer(1000 * at.comm.world_size, "float32")
    at.run(lambda: at.gather(full, 4000))
    torch.cuda.synchronize()
    return full, tensor.nbytes // at.comm.world_size


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "no CommunicationError"


def ends(at: Connected, begin: float) -> dict[str, Any]:
    """The device comes back, every later call raises, and the GPU can be used on."""
    torch.cuda.synchronize()
    deadline = time.monotonic() + SLACK_S
    while at.comm.poisoned() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    took_s = time.monotonic() - begin
    text = raised(at.comm.barrier)
    assert raised(lambda: at.comm.allocate(16, shared=True)) == text
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    at.comm.close()
    return {"text": text, "took_s": took_s, "closed_s": time.monotonic() - begin}


def lose_a_rank(rank: ranks.Rank, kind: str) -> dict[str, Any]:
    at = Connected(rank, kind=kind)
    full, _ = at.buffer(1000 * rank.world_size, "float32")
    at.comm.barrier()
    if rank.rank == rank.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    text = raised(lambda: at.gather(full, 4000).wait())
    result = ends(at, begin)
    assert text in ("no CommunicationError", result["text"])
    return result


@every_kind
def test_a_killed_rank_is_named_by_all_others(kind: str) -> None:
    victim = RANK_NUM - 1
    with ranks.Group(lose_a_rank, kind, world_size=RANK_NUM) as group:
        group.wait(timeout_s=150.0)
    assert group.outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in group.outcomes[:victim]:
        assert outcome.error is None and outcome.exit_code == 0, outcome
        assert f"rank {victim} died during all_gather of 'python'" in outcome.value["text"]
        assert outcome.value["took_s"] < SLACK_S  # far below the timeout of 60 s


def stall(rank: ranks.Rank, kind: str) -> dict[str, Any]:
    at = Connected(rank, kind=kind, timeout_s=5.0)
    full, shard_bytes = warm(at)
    at.comm.barrier()
    begin = time.monotonic()
    if rank.rank == 1:
        time.sleep(12.0)
    else:
        at.gather(full, shard_bytes).wait()
    return ends(at, begin)


@every_kind
def test_a_rank_that_does_not_come_ends_the_others_at_the_timeout(kind: str) -> None:
    waiting, sleeping = ranks.run(stall, kind, world_size=2, timeout_s=120.0)
    said = "rank 0 waited 5.00 s for rank 1 in all_gather of 'python'"
    assert waiting["text"] == said
    assert 5.0 <= waiting["took_s"] < 5.0 + SLACK_S
    assert sleeping["text"] == f"rank 0 aborted: {said}"


def leave(rank: ranks.Rank) -> dict[str, Any]:
    at = Connected(rank, kind="peer")
    full, shard_bytes = warm(at)
    at.comm.barrier()
    begin = time.monotonic()
    if rank.rank == 1:
        at.comm.close()
        return {}
    at.gather(full, shard_bytes).wait()
    return ends(at, begin)


def test_a_rank_that_leaves_is_named_by_one_whose_device_waits() -> None:
    waiting, _ = ranks.run(leave, world_size=2, timeout_s=120.0)
    assert waiting["text"] in [
        f"rank 1 {how} during all_gather of 'python' (noticed by rank 0)"
        for how in ("left", "died")  # its process ends soon after
    ]
    assert waiting["took_s"] < SLACK_S  # far below the timeout of 60 s


def mismatch(rank: ranks.Rank, kind: str) -> dict[str, Any]:
    at = Connected(rank, kind=kind)
    full, shard_bytes = warm(at)
    begin = time.monotonic()
    at.gather(full, shard_bytes if rank.rank == 0 else shard_bytes // 4)
    text = raised(at.comm.barrier)
    result = ends(at, begin)
    assert result["text"] == text
    return result


@every_kind
def test_a_mismatched_collective_is_named_on_all_ranks(kind: str) -> None:
    results = ranks.run(mismatch, kind, world_size=2, timeout_s=120.0)
    for result in results:
        assert (
            "rank 0 all_gather of 'python' (4000 bytes), rank 1 all_gather of 'python' (1000 bytes)"
            in (result["text"])
        )
        assert result["took_s"] < SLACK_S


def abort_in_the_middle(rank: ranks.Rank, kind: str) -> dict[str, Any]:
    at = Connected(rank, kind=kind)
    full, shard_bytes = warm(at)
    at.comm.barrier()
    begin = time.monotonic()
    if rank.rank == 0:
        time.sleep(0.5)
        at.comm.abort("the model is wrong")
        at.comm.abort("and this is too late")
    else:
        at.gather(full, shard_bytes).wait()
    return ends(at, begin)


@every_kind
def test_an_abort_reaches_ranks_whose_device_waits(kind: str) -> None:
    for result in ranks.run(abort_in_the_middle, kind, world_size=2, timeout_s=120.0):
        assert result["text"] == "rank 0 aborted: the model is wrong"
        assert result["took_s"] < SLACK_S


CLOSE_TIMEOUT_S = 8.0  # in which NCCL connects, also on a busy machine


def close_in_the_middle(rank: ranks.Rank, kind: str) -> float:
    at = Connected(rank, kind=kind, timeout_s=CLOSE_TIMEOUT_S)
    full, shard_bytes = warm(at)
    at.comm.barrier()
    begin = time.monotonic()
    if rank.rank == 0:
        at.gather(full, shard_bytes)  # nobody else starts it
    else:
        time.sleep(CLOSE_TIMEOUT_S + 3.0)
    at.comm.close()
    torch.cuda.synchronize()
    return time.monotonic() - begin


@every_kind
def test_closing_ends_what_cannot_end(kind: str) -> None:
    for took_s in ranks.run(close_in_the_middle, kind, world_size=2, timeout_s=120.0):
        assert took_s < CLOSE_TIMEOUT_S + 3.0 + SLACK_S


def share_a_gpu(rank: ranks.Rank, kind: str) -> str:
    return raised(lambda: Connected(rank, kind=kind, ordinal=0, timeout_s=30.0))


def test_two_ranks_on_one_gpu_are_refused_by_nccl() -> None:
    for text in ranks.run(share_a_gpu, "nccl", world_size=2, timeout_s=120.0):
        assert "both use the GPU" in text and "'peer'" in text, text
