"""A rank's parts of a model that is cut into pipeline stages, and the clock around what they compute."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from zerobench.errors import ConfigError
from zerobench.models.transformer import Transformer
from zerobench.strategies.clock import Clock, NoClock
from zerobench.strategies.pipelining import cut_layers


class Part(nn.Module):
    """Consecutive layers of a model, with the embedding before the first and the loss after the last. Its modules are
    the model's own."""

    def __init__(self, model: Transformer, layers: range) -> None:
        super().__init__()
        self._whole = (model,)  # in a tuple, or all of its parameters would be this part's
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(model.blocks)
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        if self.is_first:
            self.embedding = nn.ModuleList((model.wte, model.wpe))
        if self.is_last:
            self.head = nn.ModuleList((model.ln_f, model.lm_head))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next part's input, or after the last part the loss as a tensor of one element."""
        (model,) = self._whole
        x = model.run(self.blocks, model.embed(x) if self.is_first else x)
        if not self.is_last:
            return x
        loss = model.loss(x, labels).loss
        assert loss is not None
        return torch.stack([loss])  # no view: the schedule detaches it in place


def parameter_names(model: nn.Module, part: Part) -> list[str]:
    """Return the model's names of a part's parameters."""
    own = {id(parameter) for parameter in part.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]


def cut(model: Transformer, part_num: int) -> list[Part]:
    """Return the parts of a model, first to last, so that the slowest takes as little as can be."""
    layer_num = len(model.blocks)
    if layer_num < part_num:
        raise ConfigError(
            f"num_layers={layer_num} is too few for {part_num} parts of a pipeline, which take a layer each: use "
            f"--num-layers {part_num} or more, fewer --pipeline-stages, or another --pipeline-schedule than interleaved"
        )
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    head = model.lm_head.weight.numel()
    return [Part(model, layers) for layers in cut_layers(layer_num, part_num, head_layers=head / block)]


class ScheduleClock:
    """Measures one run of the schedule on this rank: how long it takes and how much of that is forward and backward.
    On GPUs by events of the current stream, which waits for a message before the action that needs it begins."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._clock: Clock = NoClock()
        self._is_on = False
        self._actions: list[tuple[Any, Any]] = []  # begin and end of each
        self._begin = self._end = None
        self._last_s = self._waited_s = 0.0

    def begin(self, clock: Clock) -> None:
        """Start to measure the schedule, which begins now. ``clock`` gets a lap after each action."""
        self._clock = clock
        self._actions, self._waited_s = [], 0.0
        self._is_on = True
        self._last_s = time.perf_counter()
        self._begin = self._now()

    def end(self) -> None:
        """The schedule has ended."""
        self._waited_s += time.perf_counter() - self._last_s
        self._clock.lap("backward")
        self._end = self._now()
        self._is_on = False

    def run(self, phase: str, action: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``action``, a forward or backward of one micro-batch."""
        if not self._is_on:
            return action(*args, **kwargs)
        begin = self._now()
        self._waited_s += time.perf_counter() - self._last_s
        result = action(*args, **kwargs)
        self._actions.append((begin, self._now()))
        self._last_s = time.perf_counter()
        self._clock.lap(phase)
        return result

    def take_waited_ms(self) -> float:
        """Return how long the host has waited between actions since the last call."""
        waited_ms, self._waited_s = self._waited_s * 1e3, 0.0
        return waited_ms

    def times_ms(self) -> tuple[float, float]:
        """Return the time in actions and the time of the whole schedule, of the last run that was measured."""
        if self._on_gpu:
            torch.cuda.synchronize()
        busy_ms = sum(self._between_ms(begin, end) for begin, end in self._actions)
        return busy_ms, self._between_ms(self._begin, self._end)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3


class TimedStage(PipelineStage):
    """torch's stage with a clock around its forwards and backwards."""

    def __init__(self, *args: Any, clock: ScheduleClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._schedule_clock = clock

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return nothing: the pipeline's ranks have exchanged token ids by now. torch 2.9 sends eight bytes here where
        it receives four, which gloo refuses."""
        return []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("forward", super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("backward", super().backward_one_chunk, *args, **kwargs)

    def _timed(self, phase: str, action: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._schedule_clock.run(phase, action, *args, **kwargs)
        except RuntimeError as error:
            # torch raises an error of its own from what went wrong, such as memory that ran out.
            raise (error.__cause__ or error) from None
