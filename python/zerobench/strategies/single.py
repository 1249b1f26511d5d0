"""Plain PyTorch in one process: the reference that every other strategy is compared with.

It takes any number of micro-batches a step and trains on their mean, so it can stand in for all ranks. In bf16
and fp16 the parameters and each micro-batch's gradients are low precision, and everything after that is fp32: the
sum over micro-batches, the clipping, and the masters that AdamW updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from zerobench.strategies.base import Batch, Dtypes, ModelFactory, StepResult, Strategy, StrategySettings
from zerobench.strategies.clock import Clock, NoClock, phase_clock
from zerobench.strategies.compiled import Compiler
from zerobench.strategies.shared import (
    Determinism,
    cast_parameters,
    clip_coefficient,
    dtypes_beside_masters,
    first_moment,
    full_fp32,
    make_adamw,
    make_grad_scaler,
    mean_loss,
    mean_of,
    precision_dtype,
    prepare_model,
    scaled_step,
    scaled_steps,
    state_tensors,
    storage_bytes,
    torch_device,
    total_norm,
)


class SingleStrategy(Strategy):
    """One process, no wrapper."""

    name = "single"

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        if settings.world_size != 1:
            return f"single runs on one rank and world_size is {settings.world_size}"
        return None

    def build(self, model_factory: ModelFactory) -> None:
        self._determinism = Determinism(self.settings)
        self._model = model = prepare_model(model_factory, self.settings)
        dtype = self._parameter_dtype()
        self._low_precision = dtype != torch.float32
        self._scaler = make_grad_scaler(self.settings)
        masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        cast_parameters(model, dtype)
        self._parameters = dict(model.named_parameters())
        self._masters = masters if self._low_precision else self._parameters
        self._trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        self._optimizer = make_adamw([self._masters[name] for name in self._trained], self.settings.optimizer)
        self._gradient_bytes: int | None = None
        self._compiler = Compiler(self.settings)
        self._compiler.apply(model)

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        return self._run(micro_batches, norm=norm, clock=NoClock())

    def _run(self, micro_batches: Sequence[Batch], *, norm: bool, clock: Clock) -> StepResult:
        losses = []
        for batch in micro_batches:
            with self._autocast():
                loss = self._model(**batch).loss
            clock.lap("forward")
            # In low precision the mean is taken in fp32 afterwards: dividing here would round.
            share = loss if self._low_precision or len(micro_batches) == 1 else loss / len(micro_batches)
            (self._scaler.scale(share) if self._scaler else share).backward()
            if self._low_precision:
                self._accumulate_in_fp32()
            losses.append(loss.detach())
            clock.lap("backward")
        grad_norm, applied = self._update(norm=norm, micro_batch_num=len(micro_batches))
        clock.lap("optimizer")
        self._compiler.count_step()
        return StepResult(loss=mean_of(losses), grad_norm=grad_norm, applied=applied)

    def _parameter_dtype(self) -> torch.dtype:
        """Return the dtype that forward reads."""
        return precision_dtype(self.settings)

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _accumulate_in_fp32(self) -> None:
        new: list[tuple[torch.Tensor, torch.Tensor]] = []  # (sum, gradient)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in self._trained:
            gradient, master = self._parameters[name].grad, self._masters[name]
            if gradient is None:
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                new.append((master.grad, gradient))
            else:
                seen.append((master.grad, gradient))
        if new:
            torch._foreach_copy_([total for total, _ in new], [gradient for _, gradient in new])
        if seen:
            torch._foreach_add_([total for total, _ in seen], [gradient for _, gradient in seen])
        self._note_gradient_bytes()
        for name in self._trained:
            self._parameters[name].grad = None

    def _note_gradient_bytes(self) -> None:
        if self._gradient_bytes is None:
            tensors = {id(tensor): tensor for tensor in (*self._parameters.values(), *self._masters.values())}
            self._gradient_bytes = storage_bytes(tensor.grad for tensor in tensors.values())

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        """Combine the fp32 gradient sums with other ranks', in place. Alone there is nothing to do."""

    def _update(self, *, norm: bool, micro_batch_num: int) -> tuple[torch.Tensor | None, bool | None]:
        """Norm, clipping and optimizer step; returns the norm before clipping and whether a step was made."""
        if not self._low_precision:
            self._note_gradient_bytes()
        gradients = self._gradients()
        self._reduce(gradients)
        if self._scaler:
            self._scaler.unscale_(self._optimizer)
        # In fp32 backward took the mean.
        factor = 1.0 / micro_batch_num if self._low_precision else 1.0
        grad_norm = None
        clip = self.settings.clip
        if norm or clip is not None:
            grad_norm = total_norm(gradients) * factor
        if clip is not None and grad_norm is not None:
            torch._foreach_mul_(gradients, clip_coefficient(grad_norm, clip) * factor)
        elif factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        applied = scaled_step(self._scaler, self._optimizer, ask=norm)
        self._publish()
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm, applied

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

    def applied_steps(self) -> int | None:
        return scaled_steps(self._scaler, self._optimizer)

    def evaluate(self, batches: Sequence[Batch]) -> float:
        with self._autocast(), self._compiler.eagerly():
            return mean_loss(self._model, batches)

    def module(self) -> nn.Module:
        return self._model

    def dtypes(self) -> Dtypes:
        return dtypes_beside_masters(self.settings)

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

    def communication_bytes(self) -> dict[str, int] | None:
        return {}  # it has no peer

    def compiled_graphs(self) -> float | None:
        return self._compiler.graphs_per_step()

    def reset_counters(self) -> None:
        self._compiler.reset()

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        clock = phase_clock(torch_device(self.settings))
        self._run(micro_batches, norm=False, clock=clock)
        return clock.phases_ms

    def close(self) -> None:
        self._determinism.restore()
        del self._model, self._parameters, self._masters, self._optimizer
