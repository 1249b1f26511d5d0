"""The socket by which a rank tells the command how it fares and gets orders, and what an error is called there."""

from __future__ import annotations

import os
import resource
import time
from typing import Literal

import torch
from pydantic import BaseModel

from zerobench.bench.protocol.job import Progress, RankError, Turn
from zerobench.bench.protocol.messages import END, send
from zerobench.errors import CommunicationError, OutOfMemoryError
from zerobench.host.machine import memory_available_bytes
from zerobench.host.processes import vm_data_bytes
from zerobench.results.sizes import GIB

TICK_INTERVAL_S = 0.5
_CUDA_ERROR_MEMORY_ALLOCATION = 2
_STACK_BYTES_WITHOUT_LIMIT = 2 << 20  # glibc's, of a thread


class Channel:
    """The socket to the command."""

    def __init__(self, fd: int, *, device: str, rank_memory_bytes: int | None = None) -> None:
        self._fd = fd
        self._device = device
        self._rank_memory_bytes = rank_memory_bytes
        self._next_tick_s = 0.0
        self.phase = "start"
        self._failed = False

    def send(self, kind: str, body: BaseModel) -> None:
        send(self._fd, kind, body.model_dump(mode="json"))

    def fail(self, error: BaseException) -> None:
        """Say what ended this rank, once and at once: closing comes after, and peers that notice it complain too."""
        if not self._failed:
            self._failed = True
            described = describe_error(
                error, self.phase, device=self._device, rank_memory_bytes=self._rank_memory_bytes
            )
            self.send("error", described)

    def tick(self, phase: str, step: int) -> None:
        """A sign of life, at most two a second within a phase so that no step notices."""
        now = time.monotonic()
        if phase == self.phase and now < self._next_tick_s:
            return
        self.phase, self._next_tick_s = phase, now + TICK_INTERVAL_S
        self.send("progress", Progress(phase=phase, step=step))

    def wait_for_turn(self, step_ms: float | None) -> bytes:
        """Report the window that was trained, and return the next order. Waiting uses no core."""
        self.send("turn", Turn(step_ms=step_ms))
        return os.read(self._fd, 1) or END  # nothing: the command has gone


def describe_error(
    error: BaseException, phase: str, *, device: str, rank_memory_bytes: int | None
) -> RankError:
    """``rank_memory_bytes``: --rank-memory-gib, where it was given."""
    lines = str(error).strip().splitlines()
    if isinstance(error, MemoryError) and lines in ([], ["std::bad_alloc"]):  # Python's and C++'s say nothing
        lines = [whose_memory(rank_memory_bytes)]
    lines = lines or ["no message"]
    tier = exhausted_tier(error, device=device)
    if tier is None and rank_memory_bytes is not None and is_refused_thread(error):
        tier, lines = "host", [f"{lines[0]} ({whose_memory(rank_memory_bytes)})"]
    return RankError(
        type=type(error).__name__,
        message=lines[0],
        phase=phase,
        out_of_memory=tier,
        communication=isinstance(error, CommunicationError | torch.distributed.DistError),
        at_s=time.time(),
    )


def whose_memory(rank_memory_bytes: int | None) -> str:
    if rank_memory_bytes is not None:
        return f"the {rank_memory_bytes / GIB:.3g} GiB that --rank-memory-gib allows a rank are used up"
    return f"the host refused memory, with {memory_available_bytes() / GIB:.3g} GiB available"


def exhausted_tier(error: BaseException, *, device: str) -> Literal["device", "host"] | None:
    """Whose memory ran out, if any did. What CPU ranks call their device is the host's."""
    of_device = isinstance(error, torch.OutOfMemoryError | OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError)
        and getattr(error, "error_code", None) == _CUDA_ERROR_MEMORY_ALLOCATION
    )
    if of_device:
        return "device" if device == "cuda" else "host"
    return "host" if isinstance(error, MemoryError) else None


def is_refused_thread(error: BaseException) -> bool:
    """Return whether a rank under a limit has no memory left for a thread's stack. Threads of Python, torch and the
    core then fail to start with a bare RuntimeError, which nothing but its text tells apart."""
    limit_bytes, stack_bytes = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_STACK)
    )
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = _STACK_BYTES_WITHOUT_LIMIT
    is_full = limit_bytes != resource.RLIM_INFINITY and limit_bytes - vm_data_bytes() < stack_bytes
    return is_full and type(error) is RuntimeError
