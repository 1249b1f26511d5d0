"""The measured pass inside a rank: a continuous window without any synchronisation that training would not have, then
validation, then a profiled pass whose clocks do not disturb the window that they explain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from zerobench import _native
from zerobench.bench.job import Window
from zerobench.strategies.base import Batch, Strategy

Tick = Callable[[str, int], None]


def measure(
    strategy: Strategy,
    *,
    warmup: Sequence[Sequence[Batch]],
    window: Sequence[Sequence[Batch]],
    validation: Sequence[Batch],
    profile: Sequence[Sequence[Batch]],
    tick: Tick,
) -> Window:
    """Train and time. Batches are made beforehand, so that reading data is in nobody's time. Collective."""
    core = _native.load()
    for step, batches in enumerate(warmup):
        strategy.step(batches)
        tick("warm-up", step + 1)
    strategy.reset_counters()
    core.reset_process_usage_peak()
    host_peak_was_reset = reset_peak_host_bytes()
    step_times_ms, losses = timed_window(strategy, window, tick)
    # Peaks end with the window: what follows is no training. Training would hold one step's batches at a time.
    waiting_bytes = waiting_batch_bytes([*warmup, *window, *profile], validation=validation)
    peak_device_bytes = core.process_usage_peak_bytes() - waiting_bytes
    allocated_device_bytes = core.process_usage_bytes() - waiting_bytes
    peak_host = peak_host_bytes() if host_peak_was_reset else None
    moved_bytes = strategy.communication_bytes()
    memory_bytes = strategy.memory_bytes()
    tick("validation", 0)
    validation_loss = strategy.evaluate(validation) if validation else None
    phases_ms = profiled_pass(strategy, profile, tick)
    return Window(
        step_times_ms=step_times_ms,
        losses=[float(loss) for loss in losses],
        validation_loss=validation_loss,
        peak_device_bytes=peak_device_bytes,
        allocated_device_bytes=allocated_device_bytes,
        peak_host_bytes=peak_host,
        communication_bytes=None if moved_bytes is None else round(moved_bytes / len(window)),
        memory_bytes=memory_bytes,
        phases_ms=phases_ms,
        threads=torch.get_num_threads(),
        communicator=strategy.communicator(),
    )


def waiting_batch_bytes(steps: Sequence[Sequence[Batch]], *, validation: Sequence[Batch]) -> int:
    """Bytes of all batches that were made beforehand but those of the largest step."""
    sizes = [batch_bytes(step) for step in steps]
    return sum(sizes) - max(sizes) + batch_bytes(validation)


def batch_bytes(batches: Sequence[Batch]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for batch in batches for tensor in batch.values()}.values())


def timed_window(
    strategy: Strategy, window: Sequence[Sequence[Batch]], tick: Tick
) -> tuple[list[float], list[torch.Tensor]]:
    """Milliseconds from the end of each step to the end of the next, and the losses, not read yet."""
    times_ns, losses = [time.perf_counter_ns()], []
    for step, batches in enumerate(window):
        losses.append(strategy.step(batches).loss)
        times_ns.append(time.perf_counter_ns())
        tick("measurement", step + 1)
    return [(end - start) / 1e6 for start, end in pairwise(times_ns)], losses


def profiled_pass(strategy: Strategy, profile: Sequence[Sequence[Batch]], tick: Tick) -> dict[str, float]:
    """Median of each phase over the profiled steps."""
    samples: dict[str, list[float]] = {}
    for step, batches in enumerate(profile):
        for phase, milliseconds in strategy.profiled_step(batches).items():
            samples.setdefault(phase, []).append(milliseconds)
        tick("profile", step + 1)
    return {phase: median(values) for phase, values in samples.items()}


def reset_peak_host_bytes() -> bool:
    """Make the kernel count this process's peak resident memory from now on; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_host_bytes() -> int | None:
    """Peak resident memory since the reset (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
