"""torch.distributed.pipelining: the model cut into stages, one rank after the other, alone or in several replicas.

torch's schedules call autograd themselves, so an engine that runs backward itself cannot sit inside a stage.
docs/decisions/0006-pipeline-strategy.md has the design.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from zerobench.errors import ConfigError
from zerobench.models.materialise import materialise
from zerobench.models.transformer import CausalLMOutput, Transformer
from zerobench.strategies.base import Batch, ScheduleTimes, StepResult, StrategySettings
from zerobench.strategies.clock import Clock, NoClock
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.pipeline_groups import Groups
from zerobench.strategies.pipeline_stage import Part, ScheduleClock, TimedStage, cut, parameter_names
from zerobench.strategies.pipelining import CHUNKS, sequences_of, why_impossible
from zerobench.strategies.sharded_scaler import FusedShardedGradScaler
from zerobench.strategies.shared import (
    cast_parameters,
    clip_coefficient,
    first_moment,
    full_fp32,
    make_grad_scaler,
    precision_dtype,
    storage_bytes,
    torch_device,
    total_norm,
)
from zerobench.strategies.traffic import Collective

_SCHEDULES: dict[str, Any] = dict(
    zip(CHUNKS, (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B), strict=True)
)


class PipelineStrategy(PeerStrategy):
    """Stages of the model on different ranks, replicas of a stage under DDP. Dtypes are those of ``ddp_master``."""

    name = "pipeline"
    shards_while_building = True

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        return why_impossible(settings)

    def _wrap(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, Transformer):
            raise ConfigError(
                f"pipeline cuts zerobench's own models only, and this is a {type(model).__name__}: use a preset such "
                "as gpt2, or remove pipeline"
            )
        self._groups = groups = Groups(self.settings)
        self._device = torch_device(self.settings)
        every = cut(model, groups.stages * CHUNKS[self._schedule_name])
        self._part_num = len(every)
        self._parts = {index: every[index] for index in range(groups.stage, len(every), groups.stages)}
        names = [parameter_names(model, part) for part in every]
        # A tied weight has two; the first one's counts.
        self._owners = {
            name: index % groups.stages for index in reversed(range(len(every))) for name in names[index]
        }
        self._make_parameters(model, {name for index in self._parts for name in names[index]})
        tied = set(names[0]) & set(names[-1])
        self._tied = [parameter for name, parameter in self._parameters.items() if name in tied]
        self._hidden_size = model.config.hidden_size
        self._clock = ScheduleClock(self._device)
        self._times: list[tuple[float, float]] = []
        self._steps = 0
        self._schedule = self._make_schedule()
        model.forward = self._evaluate_together  # type: ignore[method-assign]
        return model

    def _make_parameters(self, model: Transformer, own: set[str]) -> None:
        materialise(model, sorted(own), device=self._device)
        dtype = precision_dtype(self.settings)
        self._low_precision = dtype != torch.float32
        self._parameters = {name: p for name, p in model.named_parameters() if name in own}
        self._masters = self._parameters
        if self._low_precision:
            self._masters = {
                name: nn.Parameter(p.detach().clone(), p.requires_grad)
                for name, p in self._parameters.items()
            }
            cast_parameters(model, dtype)

    @property
    def _schedule_name(self) -> str:
        assert self.settings.pipeline_schedule is not None
        return self.settings.pipeline_schedule

    @property
    def _micro_batch_num(self) -> int:
        assert self.settings.micro_batches is not None
        return self.settings.micro_batches

    @property
    def _holds_first(self) -> bool:
        return self._groups.stage == 0

    @property
    def _holds_last(self) -> bool:
        return self._groups.stage == self._groups.stages - 1

    def _make_schedule(self) -> Any:
        stages = [self._make_stage(index, part) for index, part in self._parts.items()]
        return _SCHEDULES[self._schedule_name](
            stages if CHUNKS[self._schedule_name] > 1 else stages[0],
            n_microbatches=self._micro_batch_num,
            loss_fn=self._share_of_loss,
            scale_grads=False,
        )

    def _make_stage(self, index: int, part: Part) -> TimedStage:
        module: nn.Module = part
        if self._groups.replicas > 1:
            module = DistributedDataParallel(
                part, process_group=self._groups.copies, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        settings = self.settings
        sequences = sequences_of(self._groups.stages, settings.batch_size, settings.grad_accum)
        tokens = (sequences // self._micro_batch_num, settings.seq_length)
        dtype = precision_dtype(settings)
        # Given, so that torch need not run the stages to learn their shapes.
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty((*tokens, self._hidden_size), dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        return TimedStage(
            module,
            index,
            self._part_num,
            self._device,
            input_args=(ids if part.is_first else hidden,),
            output_args=(loss if part.is_last else hidden,),
            group=self._groups.pipeline,
            clock=self._clock,
        )

    def _share_of_loss(self, loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        share = loss.sum() / self._micro_batch_num
        return self._scaler.scale(share) if self._scaler else share

    def _make_scaler(self) -> torch.amp.GradScaler | None:
        scaler = make_grad_scaler(self.settings, FusedShardedGradScaler)
        if scaler is not None:
            scaler.scale(torch.zeros(1, device=self._device))  # makes the scale, also where no loss is scaled
        return scaler

    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Return nothing to enter: the schedule runs the micro-batches."""
        return nullcontext()

    def _run(self, micro_batches: Sequence[Batch], *, norm: bool, clock: Clock) -> StepResult:
        input_ids, labels = self._batch_of_pipeline(micro_batches)
        is_timed = not isinstance(clock, NoClock)
        if is_timed:
            self._clock.begin(clock)
        losses = self._schedule.step(
            *((input_ids.flatten(0, 1),) if self._holds_first else ()),
            target=labels.flatten(0, 1) if self._holds_last else None,
            **({"labels": labels.flatten(0, 1)} if self._holds_last else {}),
        )
        loss = torch.zeros((), device=self._device) if losses is None else losses.detach().float().mean()
        loss = self._groups.broadcast(loss, stage=self._groups.stages - 1)
        if is_timed:
            self._clock.end()
        if self._gradient_bytes is None:
            self._gradient_bytes = self._held_gradient_bytes()
        grad_norm, applied = self._update(norm=norm)
        self._after_step()
        clock.lap("optimizer")
        self._compiler.count_step()
        self._steps += 1
        return StepResult(loss=loss, grad_norm=grad_norm, applied=applied)

    def _batch_of_pipeline(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids and labels (batches, sequences, tokens) of all ranks of this pipeline."""
        mine = torch.stack([torch.stack((batch["input_ids"], batch["labels"])) for batch in batches])
        every = self._groups.all_gather(mine).flatten(0, 1)
        return every[:, 0], every[:, 1]

    def _update(self, *, norm: bool) -> tuple[torch.Tensor | None, bool | None]:
        for parameter in self._tied:
            dist.all_reduce(parameter.grad, group=self._groups.ends)
        if not self._low_precision:
            return super()._update(norm=norm)
        pairs = [(p, self._masters[name]) for name, p in self._parameters.items() if p.requires_grad]
        for parameter, master in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        found = super()._update(norm=norm)
        with torch.no_grad():
            torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])
        return found

    def _clip(self, clip: float | None) -> torch.Tensor:
        counted = [
            master.grad
            for name, master in self._masters.items()
            if master.grad is not None and self._owners[name] == self._groups.stage
        ]
        square = total_norm(counted).double().square()
        dist.all_reduce(square, group=self._groups.pipeline)
        norm = square.sqrt().float()
        if clip is not None:
            gradients = [master.grad for master in self._masters.values() if master.grad is not None]
            torch._foreach_mul_(gradients, clip_coefficient(norm, clip))
        return norm

    def _after_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=self._low_precision or self._groups.replicas == 1)
        if self._low_precision:
            for parameter in self._parameters.values():
                if self._groups.replicas == 1:
                    parameter.grad = None
                elif parameter.grad is not None:  # a view of DDP's bucket
                    parameter.grad.zero_()

    def _held_gradient_bytes(self) -> int:
        masters = sum(master.nbytes for master in self._masters.values()) if self._low_precision else 0
        return storage_bytes(parameter.grad for parameter in self._parameters.values()) + masters

    def _optimized(self) -> list[nn.Parameter]:
        return [master for master in self._masters.values() if master.requires_grad]

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's masters."""
        return self._masters

    def _evaluate_together(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> CausalLMOutput:
        """Return the loss of this rank's batch, after all stages ran every rank's batch, one after the other."""
        assert labels is not None
        every_ids, every_labels = self._batch_of_pipeline([{"input_ids": input_ids, "labels": labels}])
        losses = torch.zeros(self._groups.stages, device=self._device)
        for number, (ids, targets) in enumerate(zip(every_ids, every_labels, strict=True)):
            for index, part in self._parts.items():
                x = ids if part.is_first else self._received(ids.shape, index)
                x = part(x, targets)
                if part.is_last:
                    losses[number] = x[0]
                else:
                    dist.send(x, dst=self._rank_of(index + 1), group=self._groups.pipeline)
        losses = self._groups.broadcast(losses, stage=self._groups.stages - 1)
        return CausalLMOutput(losses[self._groups.stage], losses.new_empty(0))

    def _received(self, tokens: torch.Size, index: int) -> torch.Tensor:
        x = torch.empty(
            (*tokens, self._hidden_size), dtype=precision_dtype(self.settings), device=self._device
        )
        dist.recv(x, src=self._rank_of(index - 1), group=self._groups.pipeline)
        return x

    def _rank_of(self, index: int) -> int:
        return self._groups.ranks[index % self._groups.stages]

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return self._from_owners(self._masters)

    def first_moments(self) -> dict[str, torch.Tensor]:
        return self._from_owners(
            {name: first_moment(self._optimizer, master) for name, master in self._masters.items()}
        )

    def _from_owners(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._model.named_parameters():
            tensor = torch.empty(parameter.shape, device=self._device)
            if self._owners[name] == self._groups.stage:
                tensor.copy_(own[name].detach())
            found[name] = full_fp32(self._groups.broadcast(tensor, stage=self._owners[name]))
        return found

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        device = super().memory_bytes()["device"]
        if self._low_precision:
            parameters = storage_bytes(self._parameters.values())
            device = {**device, "parameters": parameters, "master": device["parameters"]}
        return {"device": device}

    def communication_bytes(self) -> dict[str, int] | None:
        moved: Counter[str] = Counter()
        for part in self.collectives():
            moved[part.name] += self._steps * part.bytes
        return dict(moved)

    def collectives(self) -> list[Collective]:
        """Return the schedule's messages, the token ids, and tied and replicated gradients, from the schedule: torch
        records no messages between two ranks."""
        settings, groups = self.settings, self._groups
        tokens = settings.grad_accum * settings.batch_size * settings.seq_length
        itemsize = precision_dtype(settings).itemsize
        hidden = groups.stages * tokens * self._hidden_size * itemsize
        tied = sum(parameter.numel() for parameter in self._tied) * itemsize
        gradients = sum(p.numel() for p in self._parameters.values() if p.requires_grad) * itemsize
        copies = 2 * (groups.replicas - 1) * gradients // groups.replicas
        onward = sum(not part.is_last for part in self._parts.values())
        back = sum(not part.is_first for part in self._parts.values())
        ids = (groups.stages - 1) * tokens * 2 * torch.int64.itemsize
        found = [
            ("forward", "point_to_point", onward * hidden, onward * self._micro_batch_num),
            ("forward", "all_gather", ids, 1),
            ("backward", "point_to_point", back * hidden, back * self._micro_batch_num),
            ("backward", "all_reduce", copies, len(self._parts)),
            ("optimizer", "all_reduce", tied, len(self._tied)),
        ]
        return [
            Collective(phase=phase, name=name, bytes=moved, calls=calls)
            for phase, name, moved, calls in found
            if moved
        ]

    def reset_counters(self) -> None:
        super().reset_counters()
        self._steps = 0

    def _take_exposed_ms(self) -> Callable[[], float] | None:
        return self._clock.take_waited_ms

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        phases = super().profiled_step(micro_batches)
        self._times.append(self._clock.times_ms())
        return phases

    def schedule_times(self) -> ScheduleTimes | None:
        if not self._times:
            return None
        busy_ms, whole_ms = (median(values) for values in zip(*self._times, strict=True))
        return ScheduleTimes(busy_ms=busy_ms, whole_ms=whole_ms)

    def close(self) -> None:
        del self._schedule, self._parts, self._parameters, self._masters, self._tied
        del self._model.forward  # which holds this strategy
        super().close()
