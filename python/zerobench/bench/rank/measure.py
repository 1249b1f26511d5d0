"""The measured pass inside a rank: a continuous window without any synchronisation that training would not have, then
validation, then a profiled pass whose clocks do not disturb the window that they explain."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from zerobench.bench.protocol.job import DeviceMemory, MovedCollective, Window
from zerobench.bench.rank.meters import Meter, Steps, Tick
from zerobench.bench.rank.transfers import of_window
from zerobench.strategies.base import Batch, Strategy


def measure(
    strategy: Strategy,
    *,
    meter: Meter,
    warmup: Steps,
    window: Steps,
    validation: Sequence[Batch],
    profile: Steps,
    tick: Tick,
    built: Callable[[], None] = lambda: None,
    trace: Callable[[Sequence[Batch]], None] | None = None,
) -> Window:
    """Train and time. Batches are made and placed beforehand, so that reading data is in nobody's time. ``built`` is
    called once steps have made whatever a strategy makes in its first one. ``trace`` trains on a step's batches after
    all that is measured. Collective."""
    began_s = time.perf_counter()
    for step, batches in enumerate(warmup[:-1]):
        strategy.step(batches)
        tick("warm-up", step + 1)
    first_steps_s = time.perf_counter() - began_s
    built()
    with only_new_garbage():
        # Before the last step, so that the window begins as steps of training do: with that step's work under way.
        began_s = time.perf_counter()
        strategy.settle()
        meter.settle()
        first_steps_s += time.perf_counter() - began_s
        energy_before_j = meter.energy_j()
        applied_before = strategy.applied_steps()
        for batches in warmup[-1:]:
            strategy.step(batches)
        tick("measurement", 0)  # the message of a new phase, before anything is timed
        strategy.reset_counters()
        offloaded_bytes = strategy.offloaded_tensor_bytes()
        host_peak_was_reset = reset_peak_host_bytes()
        began_s = time.time()
        step_times_ms, losses = timed_window(strategy, window, meter, tick)
        ended_s = time.time()
        energy_per_step_j = energy_per_step(
            energy_before_j, meter.energy_j(), warmup_num=len(warmup), window_num=len(window)
        )
    # Peaks end with the window: what follows is no training. Training would hold one step's batches at a time.
    waiting_bytes = waiting_batch_bytes([*warmup, *window, *profile], validation=validation)
    memory = step_memory(meter, elsewhere_bytes=waiting_bytes + offloaded_bytes)
    peak_host = peak_host_bytes() if host_peak_was_reset else None
    moved_bytes = strategy.communication_bytes()
    memory_bytes = strategy.memory_bytes()
    transfers = of_window(strategy.transfers(), step_num=steps_since_settle(len(warmup), len(window)))
    compiled_graphs = strategy.compiled_graphs()
    applied = updates_since(applied_before, strategy.applied_steps())
    activation_bytes = activations(strategy, window[-1], meter, waiting_bytes=waiting_bytes)
    activation_and_shard_bytes = activations(
        strategy, window[-1], meter, waiting_bytes=waiting_bytes, keep_shards=True
    )
    tick("validation", 0)
    validation_loss = strategy.evaluate(validation) if validation else None
    profiled = meter.profile(strategy, profile, tick)
    schedule = strategy.schedule_times()
    collectives = strategy.collectives() if profile and strategy.settings.world_size > 1 else None
    if trace is not None:
        tick("trace", 0)
        trace(window[-1])
    return Window(
        first_steps_s=first_steps_s if len(warmup) > 1 else None,
        step_times_ms=step_times_ms,
        losses=[float(loss) for loss in losses],
        began_s=began_s,
        ended_s=ended_s,
        validation_loss=validation_loss,
        memory=memory,
        peak_host_bytes=peak_host,
        communication_bytes=None
        if moved_bytes is None
        else {name: round(moved / len(window)) for name, moved in moved_bytes.items() if moved},
        collectives=None
        if collectives is None
        else [MovedCollective(**asdict(collective)) for collective in collectives],
        memory_bytes=memory_bytes,
        activation_bytes=activation_bytes,
        activation_and_shard_bytes=activation_and_shard_bytes,
        phases_ms=profiled.phases_ms,
        device_busy_pct=profiled.busy_pct,
        schedule_busy_ms=schedule and schedule.busy_ms,
        schedule_ms=schedule and schedule.whole_ms,
        transfers=transfers,
        energy_per_step_j=energy_per_step_j,
        compiled_graphs=compiled_graphs,
        applied_steps=applied,
        skipped_steps=None if applied is None else steps_since_settle(len(warmup), len(window)) - applied,
        threads=torch.get_num_threads(),
        communicator=strategy.communicator(),
        update_cpus=strategy.update_cpus(),
    )


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Python's collector looks at nothing that was made before. Steps still free the cycles that they make, and none of
    them waits until libraries, compiled code and the model were searched."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def steps_since_settle(warmup_num: int, window_num: int) -> int:
    """Return the steps that counters cover. They begin with nothing under way: before the last warm-up step."""
    return window_num + min(warmup_num, 1)


def updates_since(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def energy_per_step(
    before_j: float | None, after_j: float | None, *, warmup_num: int, window_num: int
) -> float | None:
    """Not where the very first step is among them, which is none like the others."""
    if before_j is None or after_j is None or warmup_num == 1:
        return None
    return (after_j - before_j) / steps_since_settle(warmup_num, window_num)


def step_memory(meter: Meter, *, elsewhere_bytes: int) -> DeviceMemory:
    """Return the memory of the window that was just stopped, without what lay in it throughout and belongs elsewhere:
    batches that wait for their step, and what CPU ranks offload."""
    memory = meter.memory()
    memory.peak_bytes -= elsewhere_bytes
    memory.allocated_bytes -= elsewhere_bytes
    return memory


def activations(
    strategy: Strategy,
    batches: Sequence[Batch],
    meter: Meter,
    *,
    waiting_bytes: int,
    keep_shards: bool = False,
) -> int | None:
    """The peak of a forward and backward beside parameters and gradients, of which ``keep_shards`` counts what a rank's
    shards would hold by then; where the strategy makes it by itself."""
    if strategy.updates:
        return None
    meter.settle()
    meter.start()
    if not strategy.step_without_gradients(batches, keep_shards=keep_shards):
        return None
    meter.mark()
    meter.stop()
    peak_bytes = step_memory(meter, elsewhere_bytes=waiting_bytes).peak_bytes
    return max(peak_bytes - strategy.memory_bytes()["device"]["parameters"], 0)


def waiting_batch_bytes(steps: Steps, *, validation: Sequence[Batch]) -> int:
    """Bytes of all batches that were made beforehand but those of the largest step."""
    sizes = [batch_bytes(step) for step in steps]
    return sum(sizes) - max(sizes) + batch_bytes(validation)


def batch_bytes(batches: Sequence[Batch]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for batch in batches for tensor in batch.values()}.values())


def timed_window(
    strategy: Strategy, window: Steps, meter: Meter, tick: Tick
) -> tuple[list[float], list[torch.Tensor]]:
    """Milliseconds from the end of each step to the end of the next, and the losses, not read yet."""
    losses = []
    meter.start()
    for step, batches in enumerate(window):
        losses.append(strategy.step(batches).loss)
        meter.mark()
        tick("measurement", step + 1)
    return meter.stop(), losses


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
