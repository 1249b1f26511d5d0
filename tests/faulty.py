"""A data-parallel strategy of the tests' own, and the faults that verification must find in it.

They are named to zerobench by place, such as ``faulty:NoAveraging`` with this folder on PYTHONPATH.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerobench.strategies.base import Batch, Dtypes, StepResult, StrategySettings
from zerobench.strategies.clock import Clock
from zerobench.strategies.peer import ProcessGroupLease
from zerobench.strategies.single import SingleStrategy


class PlainDataParallel(SingleStrategy):
    """Replicated everything: fp32 gradient sums all-reduced tensor by tensor over gloo. Right, and slow."""

    name = "plain"

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        return None

    def build(self, model_factory) -> None:
        self._lease = ProcessGroupLease(self.settings, strategy=self.name)
        super().build(model_factory)

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= self.settings.world_size

    def dtypes(self) -> Dtypes:
        low = super().dtypes()
        return Dtypes(
            param=low.param, compute=low.compute, reduce="float32", master="float32", state="float32"
        )

    def communication_bytes(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        super().close()
        self._lease.close()


class NoAveraging(PlainDataParallel):
    """Gradients are summed over ranks and never divided: Adam hardly notices, training with clipping does."""

    name = "no-averaging"

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient)


class DroppedRank(PlainDataParallel):
    """The last rank's gradients never arrive, and the mean is taken over the others."""

    name = "dropped-rank"

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            if self.settings.rank == self.settings.world_size - 1:
                gradient.zero_()
            dist.all_reduce(gradient)
            gradient /= self.settings.world_size - 1


class HalvedGradient(PlainDataParallel):
    """Half of the elements of one tensor's gradient are counted half."""

    name = "halved-gradient"

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        super()._reduce(gradients)
        victim = gradients[len(gradients) // 2].view(-1)
        victim[: max(victim.numel() // 2, 1)] /= 2


class StaleShard(PlainDataParallel):
    """The last rank's shard is updated by nobody: what was gathered first is what stays."""

    name = "stale-shard"

    def _publish(self) -> None:
        shard = self._trained[-(len(self._trained) // self.settings.world_size) :]
        with torch.no_grad():
            for name in shard:
                self._masters[name].copy_(self._initial[name])
        super()._publish()

    def build(self, model_factory) -> None:
        super().build(model_factory)
        self._initial = self.full_parameters()


class PerturbedParameters(PlainDataParallel):
    """After each step every parameter moves by up to half a learning rate more."""

    name = "perturbed-parameters"

    def _run(self, micro_batches: list[Batch], *, norm: bool, clock: Clock) -> StepResult:
        result = super()._run(micro_batches, norm=norm, clock=clock)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name in self._trained:
                noise = torch.rand(self._masters[name].shape, generator=generator) - 0.5
                self._masters[name] += self.settings.optimizer.lr * noise
        self._publish()
        return result


FAULTS = [NoAveraging, DroppedRank, HalvedGradient, StaleShard, PerturbedParameters]  # of training


class OldParameter(PlainDataParallel):
    """One rank's forward reads the last parameter as it was at the start, in low precision; the masters are right."""

    name = "old-parameter"

    def _publish(self) -> None:
        kept = self._parameters[self._trained[-1]].detach().clone()
        super()._publish()
        if self._low_precision and self.settings.rank == 1:
            with torch.no_grad():
                self._parameters[self._trained[-1]].copy_(kept)


class OtherEvaluation(PlainDataParallel):
    """Trains well and evaluates the first half of every sequence."""

    name = "other-evaluation"

    def evaluate(self, batches: list[Batch]) -> float:
        return super().evaluate([{k: v[:, : v.shape[1] // 2] for k, v in b.items()} for b in batches])


class OtherRate(PlainDataParallel):
    """A learning rate 2 % too high."""

    name = "other-rate"

    def build(self, model_factory) -> None:
        super().build(model_factory)
        for group in self._optimizer.param_groups:
            group |= self.changed()

    def changed(self) -> dict[str, object]:
        return {"lr": 1.02 * self.settings.optimizer.lr}


class OtherBeta(OtherRate):
    """A beta2 that other recipes have."""

    name = "other-beta"

    def changed(self) -> dict[str, object]:
        return {"betas": (self.settings.optimizer.beta1, 0.95)}


class NoDecay(OtherRate):
    """No weight decay."""

    name = "no-decay"

    def changed(self) -> dict[str, object]:
        return {"weight_decay": 0.0}
