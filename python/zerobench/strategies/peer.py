"""Parts that peers over torch.distributed share: the process group, the step, and the readers."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from zerobench.errors import ConfigError
from zerobench.host.meeting import expect_to_meet
from zerobench.strategies.base import Batch, Dtypes, ModelFactory, StepResult, Strategy, StrategySettings
from zerobench.strategies.clock import Clock, NoClock, phase_clock
from zerobench.strategies.compiled import Compiler
from zerobench.strategies.flight_recorder import StepTraffic, switch_recorder_on
from zerobench.strategies.shared import (
    Determinism,
    bind_device,
    clip_coefficient,
    dtypes_beside_masters,
    first_moment,
    full_fp32,
    local_tensor,
    make_adamw,
    make_grad_scaler,
    mean_loss,
    mean_of,
    prepare_model,
    scaled_step,
    scaled_steps,
    state_tensors,
    storage_bytes,
    torch_device,
    total_norm,
)


class ProcessGroupLease:
    """The default process group: the caller's if there is one, else one that ``close`` destroys: gloo, and NCCL beside
    it where the model is on GPUs. ``environ`` names the rendezvous, as torch.distributed reads it."""

    def __init__(
        self, settings: StrategySettings, *, strategy: str, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._owned = not dist.is_initialized()
        if not self._owned:
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ConfigError(
                f"{strategy} runs over torch.distributed and {' and '.join(missing)} is not set: "
                "start it by `zerobench compare` or torchrun"
            )
        if settings.world_size > 1:
            expect_to_meet(settings.world_size, address=environ["MASTER_ADDR"])
        switch_recorder_on()
        device = bind_device(settings)
        self._on_gpu = on_gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method="env://",
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timedelta(seconds=settings.timeout_s),
            device_id=device if on_gpu else None,
        )

    def close(self) -> None:
        if not (self._owned and dist.is_initialized()):
            return
        if self._on_gpu and sys.exc_info()[0] is not None:
            # Destroying waits for collectives that a rank which failed has begun and the others never join.
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """Return the backend by which the default process group moves a device's tensors."""
    name = str(dist.get_backend())  # one name for all devices, or "cpu:gloo,cuda:nccl"
    by_device = dict(part.split(":") for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name)


class PeerStrategy(Strategy):
    """A model behind a wrapper that communicates by itself, fused AdamW and, in fp16, torch's GradScaler."""

    shards_while_building: ClassVar[bool] = False  # _wrap gets parameters on the meta device

    def build(self, model_factory: ModelFactory) -> None:
        self._determinism = Determinism(self.settings)
        self._lease = ProcessGroupLease(self.settings, strategy=self.name)
        self._compiler = Compiler(self.settings)
        self._traffic = StepTraffic()
        self._gradient_bytes: int | None = None
        model = prepare_model(model_factory, self.settings, on_meta=self.shards_while_building)
        self._compiler.apply(model)
        self._model = self._wrap(model)
        self._optimizer = self._make_optimizer()
        self._scaler = self._make_scaler()

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module: ...

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_adamw(self._optimized(), self.settings.optimizer)

    def _optimized(self) -> list[nn.Parameter]:
        """Return the parameters that AdamW updates."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        return make_grad_scaler(self.settings)

    @abstractmethod
    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch: only the last one's backward reduces gradients."""

    @abstractmethod
    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the plain model's names."""

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _after_step(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def _held_gradient_bytes(self) -> int:
        """Bytes of gradients at the end of the last backward, before the optimizer step."""
        return storage_bytes(parameter.grad for parameter in self._model.parameters())

    def _take_exposed_ms(self) -> Callable[[], float] | None:
        """A reader of the exposed communication time since its last call, where it can be told. Asked on CPU alone."""
        return None

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        self._traffic.begin_step()
        return self._run(micro_batches, norm=norm, clock=NoClock())

    def _run(self, micro_batches: Sequence[Batch], *, norm: bool, clock: Clock) -> StepResult:
        losses = []
        for index, batch in enumerate(micro_batches):
            with self._micro_batch(is_last=index == len(micro_batches) - 1):
                with self._autocast():
                    loss = self._model(**batch).loss
                clock.lap("forward")
                share = loss / len(micro_batches) if len(micro_batches) > 1 else loss
                (self._scaler.scale(share) if self._scaler else share).backward()
                losses.append(loss.detach())
                clock.lap("backward")
        if self._gradient_bytes is None:
            self._gradient_bytes = self._held_gradient_bytes()
        grad_norm, applied = self._update(norm=norm)
        self._after_step()
        clock.lap("optimizer")
        self._compiler.count_step()
        return StepResult(loss=mean_of(losses), grad_norm=grad_norm, applied=applied)

    def _update(self, *, norm: bool) -> tuple[torch.Tensor | None, bool | None]:
        if self._scaler:
            self._scaler.unscale_(self._optimizer)
        grad_norm = None
        if norm or self.settings.clip is not None:
            grad_norm = self._clip(self.settings.clip)
        return grad_norm, scaled_step(self._scaler, self._optimizer, ask=norm)

    def _clip(self, clip: float | None) -> torch.Tensor:
        """The global norm of the gradients, which are clipped to ``clip`` where there is one."""
        gradients = [p.grad for p in self._optimized() if p.grad is not None]
        norm = total_norm(gradients)
        if clip is not None:
            torch._foreach_mul_(list(map(local_tensor, gradients)), clip_coefficient(norm, clip))
        return norm

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
        return {name: full_fp32(parameter) for name, parameter in self._named_parameters().items()}

    def first_moments(self) -> dict[str, torch.Tensor]:
        named = self._named_parameters().items()
        return {name: first_moment(self._optimizer, parameter) for name, parameter in named}

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        return {
            "device": {
                "parameters": storage_bytes(self._named_parameters().values()),
                "gradients": self._gradient_bytes or 0,
                "master": 0,  # the parameters themselves are fp32
                "exp_avg": storage_bytes(state_tensors(self._optimizer, "exp_avg")),
                "exp_avg_sq": storage_bytes(state_tensors(self._optimizer, "exp_avg_sq")),
            }
        }

    def compiled_graphs(self) -> float | None:
        return self._compiler.graphs_per_step()

    def communication_bytes(self) -> dict[str, int] | None:
        return self._traffic.moved_bytes()

    def reset_counters(self) -> None:
        self._compiler.reset()
        self._traffic.reset()

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        device = torch_device(self.settings)
        take_ms = self._take_exposed_ms() if device.type == "cpu" else None  # a profiler tells elsewhere
        clock = phase_clock(device, {"exposed_communication": take_ms} if take_ms else None)
        self._run(micro_batches, norm=False, clock=self._with_traffic(clock))
        return clock.phases_ms

    def _with_traffic(self, clock: Clock) -> Clock:
        """Return the clock of a profiled step, with a count of collectives where the wrapper lets it be made."""
        return clock

    def communicator(self) -> str | None:
        return backend_of(torch_device(self.settings)) if self.settings.world_size > 1 else None

    def close(self) -> None:
        self._determinism.restore()
        del self._model, self._optimizer
        self._lease.close()
