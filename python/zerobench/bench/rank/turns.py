"""Windows that a rank trains at an order and times, between which it waits while other rows have their turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

from zerobench.bench.protocol.channel import Channel
from zerobench.bench.protocol.messages import TRAIN
from zerobench.bench.rank.measure import only_new_garbage
from zerobench.bench.rank.meters import Meter, Steps
from zerobench.errors import Error
from zerobench.strategies.base import Batch, Strategy


def take_turns(
    strategy: Strategy,
    *,
    meter: Meter,
    steps: Steps,
    warmup_steps: int,
    steps_per_window: int,
    channel: Channel,
    built: Callable[[], None] = lambda: None,
) -> None:
    """Warm up, then train a window at each order until an order ends it. ``steps`` are used again and again. ``built``
    is called once steps have made whatever a strategy makes in its first one. Collective."""
    batches = cycle(steps)
    for step in range(warmup_steps):
        strategy.step(next(batches))
        channel.tick("warm-up", step + 1)
    built()
    with only_new_garbage():
        rest(strategy, meter)
        step_ms, turn = None, 0
        while channel.wait_for_turn(step_ms) == TRAIN:
            turn += 1
            step_ms = window(
                strategy, batches, steps_per_window, meter=meter, channel=channel, phase=f"window {turn}"
            )


def window(
    strategy: Strategy,
    batches: Iterator[Sequence[Batch]],
    num_steps: int,
    *,
    meter: Meter,
    channel: Channel,
    phase: str,
) -> float:
    """Return the mean time of a step in milliseconds. One step before them takes up what the pause left: ranks that
    woke one after the other, cold caches. The timed steps so begin and end with a step's work under way, as in
    training."""
    channel.tick(phase, 0)
    strategy.step(next(batches))
    meter.start()
    for step in range(num_steps):
        loss = strategy.step(next(batches)).loss
        meter.mark()
        channel.tick(phase, step + 1)
    step_ms = sum(meter.stop()) / num_steps
    rest(strategy, meter)
    if not math.isfinite(float(loss)):
        raise Error(f"the loss after {phase} is not finite, so nothing is trained; give a lower --lr")
    return step_ms


def rest(strategy: Strategy, meter: Meter) -> None:
    """Leave nothing under way, on the device or in other threads."""
    strategy.settle()
    meter.settle()
