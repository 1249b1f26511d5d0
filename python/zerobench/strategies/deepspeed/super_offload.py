"""SuperOffload: DeepSpeed ZeRO-3 whose CPU Adam is a process of its own and, without clipping, runs during backward."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import torch

from zerobench.strategies.base import Batch, ModelFactory, StepResult
from zerobench.strategies.deepspeed.partitions import gather, state_of
from zerobench.strategies.deepspeed.strategy import DeepSpeedStrategy

GIB = 1 << 30
_SHARED_MEMORY = "/dev/shm"
_SHARED_BYTES = 8  # a parameter: fp32 master and gradient


class DeepSpeed3SuperStrategy(DeepSpeedStrategy):
    """The worker process keeps the moments to itself. For verification they are formed here too, from the gradients
    that it was handed: what it does with them shows in the masters."""

    name = "deepspeed3_super"
    stage = 3
    super_offload = True

    def build(self, model_factory: ModelFactory) -> None:
        super().build(model_factory)
        self._exp_avg: dict[int, torch.Tensor] = {}  # by sub-group

    def _check_room(self, parameter_count: int) -> None:
        """Masters and gradients are passed to the worker in shared memory, where too little of it is a SIGBUS."""
        settings = self.settings
        share = settings.offload_ratio if isinstance(settings.offload_ratio, float) else 1.0
        needed = share * _SHARED_BYTES * parameter_count * settings.local_world_size / settings.world_size
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if needed > free:
            raise MemoryError(
                f"SuperOffload keeps masters and gradients in {_SHARED_MEMORY}: {needed / GIB:.1f} GiB are needed and "
                f"{free / GIB:.1f} are free: make it larger"
            )

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        result = super().step(micro_batches, norm=norm)
        if self.settings.deterministic:
            self._follow()
        return result

    def _follow(self) -> None:
        weight = 1 - self.settings.optimizer.beta1
        for index, flat in enumerate(self._engine.optimizer.fp32_partitioned_groups_flat):
            if index not in self._exp_avg:
                self._exp_avg[index] = torch.zeros(flat.shape)
            self._exp_avg[index].lerp_(flat.grad.detach().cpu().float(), weight)

    def first_moments(self) -> dict[str, torch.Tensor]:
        optimizer = self._engine.optimizer
        found = {}
        for index, group in enumerate(optimizer.fp16_groups):
            # Of sub-groups on the GPU.
            known = state_of(optimizer, optimizer.fp32_partitioned_groups_flat[index])
            moments, offset = known.get("exp_avg", self._exp_avg.get(index)), 0
            for parameter in group:
                numel = parameter.partition_numel()
                if moments is not None:
                    found[id(parameter)] = gather(optimizer, parameter, moments.narrow(0, offset, numel))
                offset += numel
        named = self._engine.module.named_parameters()
        return {name: found[id(p)] if id(p) in found else torch.zeros(p.ds_shape) for name, p in named}

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """With the moments that the worker holds for the sub-groups that are its own."""
        held = super().memory_bytes()
        optimizer = self._engine.optimizer
        numel = sum(
            flat.numel() for flat in optimizer.fp32_partitioned_groups_flat if flat.device.type == "cpu"
        )
        host = held.setdefault("host", {})
        for category in ("exp_avg", "exp_avg_sq"):
            host[category] = host.get(category, 0) + 4 * numel
        return held

    def close(self) -> None:
        self._engine.optimizer.superoffload_cpu_optimizer.close()
        super().close()
