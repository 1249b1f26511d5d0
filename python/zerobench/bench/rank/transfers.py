"""Cost of offloaded state, from a strategy's counters, next to the speed of the link and the files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerobench.bench.protocol.job import WindowTransfers
from zerobench.host.disks import probe
from zerobench.host.io_settings import Rates, io_choice
from zerobench.strategies.base import Transfers

_PROBE_BYTES = 256 << 20
_PROBE_COPIES = 4


def of_window(found: Transfers | None, *, step_num: int) -> WindowTransfers | None:
    """A strategy's counters as figures of one step."""
    if found is None:
        return None

    def per_step(value: int | None) -> int | None:
        return None if value is None else round(value / step_num)

    return WindowTransfers(
        to_host_bytes=per_step(found.to_host_bytes),
        to_device_bytes=per_step(found.to_device_bytes),
        nvme_read_bytes=per_step(found.nvme_read_bytes),
        nvme_written_bytes=per_step(found.nvme_written_bytes),
        pinned_bytes=found.pinned_bytes,
        pinned_requested_bytes=found.pinned_requested_bytes,
        offload_ratio=found.offload_ratio,
        io_engine=found.io_engine,
        chunk_numel=found.chunk_numel,
    )


def link_limits(device: torch.device) -> dict[str, float]:
    """GB/s of large copies between pinned memory and a GPU: each way alone, and in each direction while both run. Empty
    on CPU ranks, which have no link. All ranks measure at about the same time, as they train."""
    if device.type != "cuda":
        return {}
    host = [torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    to_host, to_device = (there[0], host[0]), (host[1], there[1])
    return {
        "to_host": _copies_gb_s([to_host]),
        "to_device": _copies_gb_s([to_device]),
        "both_ways": _copies_gb_s([to_host, to_device]),
    }


def file_limits(paths: Sequence[str], *, options: Mapping[str, Any], rank_num: int) -> dict[str, float]:
    """GB/s of files on these folders together, as the engine would use them: reads alone, writes alone, and the sum of
    both while they run together. Empty where nothing swaps. All ``rank_num`` ranks of a host measure at about the same
    time, as they train. Error or OSError where they cannot."""
    if not paths:
        return {}
    return by_direction(probe(paths, io_choice(paths, options.get("offload_optimizer")), rank_num=rank_num))


def by_direction(rates: Rates) -> dict[str, float]:
    return {
        "nvme_read": rates.read_bytes_per_s / 1e9,
        "nvme_write": rates.write_bytes_per_s / 1e9,
        "nvme_both": rates.both_bytes_per_s / 1e9,
    }


def _copies_gb_s(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the speed of copying all (source, target) pairs, each on its own stream. The first round warms up."""
    streams = [torch.cuda.Stream() for _ in pairs]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for timed in (False, True):
        torch.cuda.synchronize()
        begin.record()
        for stream, (source, target) in zip(streams, pairs, strict=True):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                for _ in range(_PROBE_COPIES if timed else 1):
                    target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
    torch.cuda.synchronize()
    return _PROBE_COPIES * _PROBE_BYTES / (begin.elapsed_time(end) / 1e3) / 1e9
