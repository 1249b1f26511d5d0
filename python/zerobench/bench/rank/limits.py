"""A rank's limit of device memory (--device-memory-gib), as a smaller device would have it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch

from zerobench.bench.plan.fit import two_amounts
from zerobench.bench.protocol.job import DeviceMemory
from zerobench.bench.rank.meters import CudaMeter, Meter
from zerobench.errors import OutOfMemoryError


def judge_host(memory_bytes: Mapping[str, Mapping[str, int]], limit_bytes: int | None) -> None:
    """Raises MemoryError where what a rank holds on the host for its offloaded state is above its share of
    --host-memory-gib."""
    held = sum(memory_bytes.get("host", {}).values())
    if limit_bytes is not None and held > limit_bytes:
        held_text, limit_text = two_amounts(held, limit_bytes)
        raise MemoryError(
            f"{held_text} of host memory are held for offloaded state and --host-memory-gib leaves a rank {limit_text}"
        )


class DeviceLimit:
    """While it is entered, torch's allocator gives out no more than the limit less what lies outside it: the engine's
    own memory, NCCL's, code. What grows there later is judged at the end. On CPU ranks, whose device memory is the
    host's, the judgement is all there is."""

    def __init__(self, limit_bytes: int | None, meter: Meter) -> None:
        self._limit_bytes = limit_bytes
        self._meter = meter if isinstance(meter, CudaMeter) else None

    def __enter__(self) -> DeviceLimit:
        self._allow(self._limit_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._limit_bytes is not None and self._meter is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self._meter.device)

    def count_outside(self) -> None:
        """Call it once everything is built, and again when more was. OutOfMemoryError where nothing is left."""
        if self._limit_bytes is None or self._meter is None:
            return
        outside_bytes = self._meter.outside_bytes()
        if outside_bytes + torch.cuda.memory_allocated(self._meter.device) > self._limit_bytes:
            raise self._exceeded(outside_bytes + torch.cuda.memory_allocated(self._meter.device))
        self._allow(self._limit_bytes - outside_bytes)

    def judge(self, memory: DeviceMemory) -> None:
        """Raises OutOfMemoryError where the measured window needed more."""
        if self._limit_bytes is not None and memory.peak_bytes > self._limit_bytes:
            raise self._exceeded(memory.peak_bytes)

    def _allow(self, torch_bytes: int | None) -> None:
        if torch_bytes is None or self._meter is None:
            return
        device = self._meter.device
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(torch_bytes / total, 1.0), device)

    def _exceeded(self, used_bytes: int) -> OutOfMemoryError:
        assert self._limit_bytes is not None
        needed, allowed = two_amounts(used_bytes, self._limit_bytes)
        return OutOfMemoryError(f"{needed} of the device are needed and --device-memory-gib allows {allowed}")
