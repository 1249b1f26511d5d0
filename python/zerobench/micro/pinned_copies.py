"""Copies between pinned host memory and GPUs, or within host memory where there is no GPU. torch is imported when
measuring starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from zerobench.host.gpus import Gpu
from zerobench.micro.pinned_ready import OURS, TORCH
from zerobench.micro.sampling import Call, calls_per_sample, rotated, seconds_per_call

SAMPLE_S = 50e-3
DIRECTIONS = ("to device", "from device", "both ways")


class HostMemory:
    """A block of each side's memory for each GPU and direction, made once."""

    def __init__(
        self, core: Any, *, size_bytes: int, block_num: int, threads: int, parts: Any = None
    ) -> None:
        import torch

        footprint = (size_bytes + 4095) // 4096 * 4096
        cpus = core.allowed_cpus()
        pool = core.PinnedPool(
            block_num * footprint,
            thread_num=threads,
            cpus=cpus,
            numa_node=core.numa_node_of_cpus(cpus),
            parts=parts,
        )
        pinned = parts is not None
        self.blocks: dict[str, list[Any]] = {
            OURS: [pool.tensor(size_bytes) for _ in range(block_num)],
            TORCH: [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(block_num)],
        }
        for index in range(block_num):
            for side in (OURS, TORCH):
                self.blocks[side][index].fill_(index + 1)


def copy_calls_on_host(memory: HostMemory) -> dict[str, Call]:
    return {
        side: lambda blocks=blocks: blocks[1].copy_(blocks[0])  # type: ignore[misc]
        for side, blocks in memory.blocks.items()
    }


def copy_calls_on_gpus(memory: HostMemory, gpus: Sequence[Gpu], direction: str) -> dict[str, Call]:
    """Every GPU in its own streams, one for each way, all at once; a call returns when all have ended."""
    import torch

    size_bytes = memory.blocks[OURS][0].numel()
    lanes = []
    for position, gpu in enumerate(gpus):
        device = f"cuda:{gpu.index}"
        for way in ("to device", "from device"):
            if direction in (way, "both ways"):
                on_device = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
                index = 2 * position + (way == "from device")
                lanes.append((way, index, on_device, torch.cuda.Stream(device)))

    def call_of(blocks: list[Any]) -> Call:
        def run() -> None:
            for way, index, on_device, stream in lanes:
                with torch.cuda.stream(stream):
                    if way == "to device":
                        on_device.copy_(blocks[index], non_blocking=True)
                    else:
                        blocks[index].copy_(on_device, non_blocking=True)
            for _, _, _, stream in lanes:
                stream.synchronize()

        return run

    return {side: call_of(blocks) for side, blocks in memory.blocks.items()}


def sample_calls(
    calls: dict[str, Call], repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of one call, by side, interleaved."""
    call_nums = {}
    for side, call in calls.items():
        call()
        call_nums[side] = calls_per_sample(seconds_per_call(call, 1), SAMPLE_S)
    times_s: dict[str, list[float]] = {side: [] for side in calls}
    for index in range(repeats):
        for side in rotated(list(calls), index):
            time.sleep(1e-3)
            times_s[side].append(seconds_per_call(calls[side], call_nums[side]))
        tick()
    return times_s
