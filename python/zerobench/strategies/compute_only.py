"""The floor: forward and backward in the parameters' dtype, with no communication and no optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from zerobench.strategies.base import Batch, Dtypes, ModelFactory, StepResult, Strategy
from zerobench.strategies.clock import Clock, NoClock, phase_clock
from zerobench.strategies.compiled import Compiler
from zerobench.strategies.shared import (
    Determinism,
    cast_parameters,
    full_fp32,
    mean_loss,
    mean_of,
    precision_dtype,
    prepare_model,
    storage_bytes,
    torch_device,
)


class ComputeOnlyStrategy(Strategy):
    """Every rank computes its own batches and forgets the gradients: what a step costs before anything is shared.

    Comparisons run it on as many ranks as the rows that refer to it: GPUs of one machine differ by some percent, ranks
    that meet go as the slowest one does, and CPU ranks share the cores."""

    name = "compute_only"
    updates: ClassVar[bool] = False

    def build(self, model_factory: ModelFactory) -> None:
        self._determinism = Determinism(self.settings)
        self._compiler = Compiler(self.settings)
        self._model = prepare_model(model_factory, self.settings)
        cast_parameters(self._model, precision_dtype(self.settings))
        self._parameters = dict(self._model.named_parameters())
        self._compiler.apply(self._model)
        self._gradient_bytes: int | None = None

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        return StepResult(loss=self._run(micro_batches, clock=NoClock()), grad_norm=None, applied=False)

    def _run(self, micro_batches: Sequence[Batch], *, clock: Clock) -> torch.Tensor:
        losses = []
        for batch in micro_batches:
            loss = self._model(**batch).loss
            clock.lap("forward")
            loss.backward()
            losses.append(loss.detach())
            clock.lap("backward")
        if self._gradient_bytes is None:
            self._gradient_bytes = storage_bytes(p.grad for p in self._parameters.values())
        self._model.zero_grad(set_to_none=True)
        self._compiler.count_step()
        return mean_of(losses)

    def step_without_gradients(self, micro_batches: Sequence[Batch], *, keep_shards: bool = False) -> bool:
        kept: dict[torch.Tensor, torch.Tensor] = {}

        def drop(parameter: torch.Tensor) -> None:
            parameter.grad = None
            if keep_shards and parameter not in kept:
                kept[parameter] = parameter.new_empty(math.ceil(parameter.numel() / self.settings.world_size))

        handles = [
            parameter.register_post_accumulate_grad_hook(drop)
            for parameter in self._parameters.values()
            if parameter.requires_grad
        ]
        try:
            self._run(micro_batches, clock=NoClock())
        finally:
            for handle in handles:
                handle.remove()
        return True

    def evaluate(self, batches: Sequence[Batch]) -> float:
        with self._compiler.eagerly():
            return mean_loss(self._model, batches)

    def dtypes(self) -> Dtypes:
        """Nothing is reduced and there is no optimizer: those roles are given the parameters' dtype."""
        low = str(precision_dtype(self.settings)).removeprefix("torch.")
        return Dtypes(param=low, compute=low, reduce=low, master=low, state=low)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: full_fp32(parameter) for name, parameter in self._parameters.items()}

    def first_moments(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(parameter.shape) for name, parameter in self._parameters.items()}

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        return {
            "device": {
                "parameters": storage_bytes(self._parameters.values()),
                "gradients": self._gradient_bytes or 0,
                "master": 0,
                "exp_avg": 0,
                "exp_avg_sq": 0,
            }
        }

    def communication_bytes(self) -> dict[str, int] | None:
        return {}

    def compiled_graphs(self) -> float | None:
        return self._compiler.graphs_per_step()

    def reset_counters(self) -> None:
        self._compiler.reset()

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        clock = phase_clock(torch_device(self.settings))
        self._run(micro_batches, clock=clock)
        return clock.phases_ms

    def close(self) -> None:
        self._determinism.restore()
        del self._model, self._parameters
