"""Plain PyTorch in one process: the reference that every other strategy is compared with.

It takes any number of micro-batches a step and trains on their mean, so it can stand in for all ranks. In bf16
and fp16 the parameters and each micro-batch's gradients are low precision, and everything after that is fp32: the
sum over micro-batches, the clipping, and the masters that AdamW updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from zerobench.strategies.base import Batch, Dtypes, StepResult, Strategy, StrategySettings
from zerobench.strategies.shared import (
    Clock,
    Determinism,
    LossScale,
    NoClock,
    PhaseClock,
    clip_coefficient,
    first_moment,
    full_fp32,
    make_adamw,
    mean_loss,
    precision_dtype,
    prepare_model,
    state_tensors,
    storage_bytes,
)


class SingleStrategy(Strategy):
    """One process, no wrapper."""

    name = "single"

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        if settings.world_size != 1:
            return f"single runs on one rank and world_size is {settings.world_size}"
        return None

    def build(self, model_factory: Callable[[], nn.Module]) -> None:
        self._determinism = Determinism(self.settings.deterministic)
        model = prepare_model(model_factory, self.settings)
        dtype = precision_dtype(self.settings)
        self._low_precision = dtype != torch.float32
        self._loss_scale = LossScale() if dtype == torch.float16 else None
        masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self._model = model.to(dtype)
        self._parameters = dict(model.named_parameters())
        self._masters = masters if self._low_precision else self._parameters
        self._trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        self._optimizer = make_adamw([self._masters[name] for name in self._trained], self.settings.optimizer)
        self._gradient_bytes: int | None = None

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        return self._run(micro_batches, norm=norm, clock=NoClock())

    def _run(self, micro_batches: Sequence[Batch], *, norm: bool, clock: Clock) -> StepResult:
        losses = []
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        for batch in micro_batches:
            loss = self._model(**batch).loss
            clock.lap("forward")
            # In low precision the mean is taken in fp32 afterwards: dividing here would round.
            (loss * scale if self._low_precision else loss / len(micro_batches)).backward()
            if self._low_precision:
                self._accumulate_in_fp32()
            losses.append(loss.detach())
            clock.lap("backward")
        grad_norm, applied = self._update(norm=norm, factor=1.0 / (len(micro_batches) * scale))
        clock.lap("optimizer")
        return StepResult(loss=torch.stack(losses).mean(), grad_norm=grad_norm, applied=applied)

    def _accumulate_in_fp32(self) -> None:
        parameters = [self._parameters[name] for name in self._trained]
        for name, parameter in zip(self._trained, parameters, strict=True):
            master = self._masters[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
        self._note_gradient_bytes()
        for parameter in parameters:
            parameter.grad = None

    def _note_gradient_bytes(self) -> None:
        if self._gradient_bytes is None:
            tensors = {id(tensor): tensor for tensor in (*self._parameters.values(), *self._masters.values())}
            self._gradient_bytes = storage_bytes(tensor.grad for tensor in tensors.values())

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        """Combine the fp32 gradient sums with other ranks', in place. Alone there is nothing to do."""

    def _update(self, *, norm: bool, factor: float) -> tuple[torch.Tensor | None, bool]:
        """Norm, clipping and optimizer step; returns the norm before clipping and whether a step was made."""
        if not self._low_precision:
            self._note_gradient_bytes()
            factor = 1.0  # backward took the mean
        gradients = self._gradients()
        self._reduce(gradients)
        total_norm, applied = None, True
        clip = self.settings.clip
        if norm or clip is not None or self._loss_scale:
            total_norm = get_total_norm(gradients) * factor
            if self._loss_scale:
                applied = bool(torch.isfinite(total_norm))
                self._loss_scale.update(finite=applied)
        if applied:
            if clip is not None and total_norm is not None:
                torch._foreach_mul_(gradients, clip_coefficient(total_norm, clip) * factor)
            elif factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self._optimizer.step()
            self._publish()
        self._optimizer.zero_grad(set_to_none=True)
        return total_norm, applied

    def _gradients(self) -> list[torch.Tensor]:
        """The masters' gradients; a parameter unused in this step has zeros, as for every strategy."""
        gradients = []
        for name in self._trained:
            master = self._masters[name]
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        return gradients

    def _publish(self) -> None:
        """Copy updated masters to what forward reads."""
        if self._low_precision:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self._parameters[name] for name in self._trained],
                    [self._masters[name] for name in self._trained],
                )

    def evaluate(self, batches: Sequence[Batch]) -> float:
        return mean_loss(self._model, batches)

    def dtypes(self) -> Dtypes:
        low = str(precision_dtype(self.settings)).removeprefix("torch.")
        return Dtypes(param=low, compute=low, reduce=low, master="float32", state="float32")

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: full_fp32(master) for name, master in self._masters.items()}

    def first_moments(self) -> dict[str, torch.Tensor]:
        return {name: first_moment(self._optimizer, master) for name, master in self._masters.items()}

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        masters = storage_bytes(self._masters.values()) if self._low_precision else 0
        return {
            "device": {
                "parameters": storage_bytes(self._parameters.values()),
                "gradients": self._gradient_bytes or 0,
                "master": masters,
                "exp_avg": storage_bytes(state_tensors(self._optimizer, "exp_avg")),
                "exp_avg_sq": storage_bytes(state_tensors(self._optimizer, "exp_avg_sq")),
            }
        }

    def communication_bytes(self) -> int | None:
        return 0  # it has no peer

    def reset_counters(self) -> None:
        self._gradient_bytes = None

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        clock = PhaseClock()
        self._run(micro_batches, norm=False, clock=clock)
        return clock.phases_ms

    def close(self) -> None:
        self._determinism.restore()
        del self._model, self._parameters, self._masters, self._optimizer
