"""FSDP2 (fully_shard): every block a group of its own, as is a large embedding or head that is not tied, the head kept
gathered after forward, as in torchtitan; the rest with the root."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from zerobench.engine.units import find_units
from zerobench.models.materialise import materialise
from zerobench.strategies.base import Batch, StrategySettings
from zerobench.strategies.clock import Clock
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.shared import precision_dtype, torch_device
from zerobench.strategies.traffic import Collective, Count, TrafficClock


class FSDP2Strategy(PeerStrategy):
    """Sharded parameters, gradients and optimizer state: what stage 3 is compared with."""

    name = "fsdp2"
    stage = 3
    shards_while_building = True
    reshard_after_forward: ClassVar[bool] = True
    keeps_head: ClassVar[bool] = True

    @classmethod
    def unplaced(cls, settings: StrategySettings) -> str | None:
        if settings.offload == "cpu_optimizer":
            return "FSDP2 offloads parameters, gradients and optimizer together: use --offload cpu_full"
        if settings.offload in ("nvme", "nvme_full"):
            return "FSDP2 offloads to host memory only: use --offload cpu_full"
        if settings.offload == "cpu_full" and settings.offload_ratio is not None:
            return "FSDP2 offloads all of its state or none: remove --offload-ratio"
        if settings.optimizer_in_backward:
            return "FSDP2 has no optimizer step during backward"
        if settings.offload != "none" and settings.device == "cuda" and settings.precision == "fp16":
            return (
                "torch's GradScaler would scale on the GPU what FSDP2's offload keeps on the host: use bf16"
            )
        return None

    def _offload_policy(self) -> OffloadPolicy:
        if self.settings.offload == "none":
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.settings.device == "cuda")

    def _wrap(self, model: nn.Module) -> nn.Module:
        dtype = precision_dtype(self.settings)
        policy = MixedPrecisionPolicy()
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        self._full_numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        mesh = init_device_mesh(self.settings.device, (self.settings.world_size,))
        shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": self._offload_policy()}
        device = torch_device(self.settings)
        units = find_units(model)  # those of our own stages
        # What backward needs first stays gathered after forward: the head and the root.
        head = getattr(model, "get_output_embeddings", lambda: None)()  # of Hugging Face models
        for name, module in zip(units.names[1:], units.modules[1:], strict=True):
            materialise(model, [name], device=device)
            reshards = self.reshard_after_forward and not (module is head and self.keeps_head)
            fully_shard(module, reshard_after_forward=reshards, **shared)
        materialise(model, device=device)
        self._root: FSDPModule = fully_shard(model, reshard_after_forward=False, **shared)
        self._groups: list[FSDPModule] = [
            module for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self._meter = _meter_collectives(self._groups)
        self._clock: TrafficClock | None = None
        return model

    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        if self.settings.grad_accum > 1:  # it visits every module
            self._root.set_requires_gradient_sync(is_last)
            # What stays gathered after forward stays so until the last backward, as in FSDP1: memory peaks where all of
            # it is there anyway, beside the sums of gradients and a micro-batch's activations.
            self._root.set_reshard_after_backward(is_last, recurse=not self.reshard_after_forward)
        return nullcontext()

    def _held_gradient_bytes(self) -> int:
        sharded = super()._held_gradient_bytes()
        if self.settings.grad_accum == 1 or self.settings.offload != "none":
            return sharded
        return max(sharded, self._accumulated_bytes())

    def _accumulated_bytes(self) -> int:
        """Micro-batches before the last leave full gradients behind, which FSDP keeps out of parameter.grad."""
        full_bytes = self._full_numel * precision_dtype(self.settings).itemsize
        return full_bytes if self.settings.grad_accum > 1 else 0

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        held = super().memory_bytes()
        if self.settings.offload == "none":
            return held
        return {"host": held["device"], "device": {"gradients": self._accumulated_bytes()}}

    def offloaded_tensor_bytes(self) -> int:
        if self.settings.offload == "none" or self.settings.device != "cpu":
            return 0
        held = super().memory_bytes()["device"]
        return held["parameters"] + held["exp_avg"] + held["exp_avg_sq"]  # gradients come and go

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def evaluate(self, batches: Sequence[Batch]) -> float:
        try:
            return super().evaluate(batches)
        finally:
            for group in self._groups:  # no backward follows that would let kept full parameters go
                group.reshard()

    def communication_bytes(self) -> dict[str, int] | None:
        """Return the bytes of FSDP's own collectives and, on GPUs, what torch recorded of others: norms and overflow
        flags of sharded tensors are all-reduced. (Not on CPU, where gloo's reduce_scatter is recorded as an
        all_reduce.)"""
        if self._meter is None:
            return super().communication_bytes()
        recorded = super().communication_bytes() if self.settings.device == "cuda" else None
        return {**(recorded or {}), **self._meter.moved_bytes}

    def reset_counters(self) -> None:
        super().reset_counters()
        if self._meter:
            self._meter.moved_bytes.clear()

    def _take_exposed_ms(self) -> Callable[[], float] | None:
        return self._meter.take_ms if self._meter else None

    def _with_traffic(self, clock: Clock) -> Clock:
        meter = self._meter
        self._clock = TrafficClock(clock, lambda: meter.counts) if meter else None
        return self._clock or clock

    def collectives(self) -> list[Collective] | None:
        if self._clock is None:
            return None
        blocks = self.settings.device == "cpu"  # on CUDA the host only enqueues
        return [
            Collective(
                phase=phase,
                name=name,
                bytes=count.bytes,
                calls=count.calls,
                ms=count.ms if blocks else None,
            )
            for (phase, name), count in self._clock.counts.items()
        ]

    def close(self) -> None:
        del self._root, self._groups
        super().close()


class FSDP2KeepStrategy(FSDP2Strategy):
    """Parameters stay gathered between forward and backward: fewer all-gathers, the memory of stage 2."""

    name = "fsdp2_keep"
    stage = 2
    reshard_after_forward = False


class _Meter:
    """Bytes (by the accounting of the communicators) and host time of FSDP's collectives. On CPU they block the
    caller, so all of their time is exposed; on CUDA they only enqueue."""

    def __init__(self) -> None:
        self.moved_bytes: Counter[str] = Counter()  # by collective
        self.counts: dict[str, Count] = {}  # the same with calls and times, never reset
        self._spent_s = 0.0

    def run(self, name: str, call: Callable[[], Any], full: torch.Tensor, shard: torch.Tensor) -> Any:
        self.moved_bytes[name] += full.nbytes - shard.nbytes
        start_s = time.perf_counter()
        try:
            return call()
        finally:
            spent_s = time.perf_counter() - start_s
            self._spent_s += spent_s
            before = self.counts.get(name, Count())
            self.counts[name] = Count(
                before.bytes + full.nbytes - shard.nbytes, before.calls + 1, before.ms + spent_s * 1e3
            )

    def take_ms(self) -> float:
        spent_ms, self._spent_s = self._spent_s * 1e3, 0.0
        return spent_ms


def _meter_collectives(modules: list[FSDPModule]) -> _Meter | None:
    """Put a meter around FSDP's default collectives, or None where this torch has no place for it."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
            DefaultAllGather,
            DefaultReduceScatter,
        )
    except ImportError:
        return None
    meter = _Meter()

    class MeteredAllGather(DefaultAllGather):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            call = super().__call__
            return meter.run(
                "all_gather",
                lambda: call(output_tensor, input_tensor, *args, **kwargs),
                output_tensor,
                input_tensor,
            )

    class MeteredReduceScatter(DefaultReduceScatter):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            call = super().__call__
            return meter.run(
                "reduce_scatter",
                lambda: call(output_tensor, input_tensor, *args, **kwargs),
                input_tensor,
                output_tensor,
            )

    for module in modules:
        module.set_custom_all_gather(MeteredAllGather())
        module.set_custom_reduce_scatter(MeteredReduceScatter())
    return meter
