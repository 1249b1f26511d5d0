"""DeepSpeed at ZeRO stages 0 to 3, with timers off and, from stage 1 on, communication overlapped and buckets sized for
the model.

DeepSpeed is imported in ``build`` and not before: importing it initialises CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from zerobench.host.locked_folder import LockedFolder
from zerobench.strategies.base import (
    NVME_OFFLOADS,
    Batch,
    Dtypes,
    ModelFactory,
    StepResult,
    Strategy,
    StrategySettings,
)
from zerobench.strategies.clock import Clock, NoClock, phase_clock
from zerobench.strategies.compiled import Compiler, repeated_blocks
from zerobench.strategies.deepspeed.config import deepspeed_config, fuses_with_torch
from zerobench.strategies.deepspeed.offload import unplaced
from zerobench.strategies.deepspeed.state import held_bytes, masters, moments, set_masters, undo_first_step
from zerobench.strategies.flight_recorder import StepTraffic
from zerobench.strategies.peer import ProcessGroupLease, backend_of
from zerobench.strategies.requirements import (
    DEEPSPEED,
    HOST_TOOLS,
    Tools,
    abandoned_build,
    gpu_capability,
    make_architectures_readable,
    missing_compiler,
    missing_package,
)
from zerobench.strategies.shared import (
    Determinism,
    dtypes_beside_masters,
    make_adamw,
    mean_loss,
    mean_of,
    prepare_model,
    torch_device,
    total_norm,
)


class DeepSpeedStrategy(Strategy):
    """The engine at the stage that a subclass names."""

    stage: ClassVar[int]
    deepcompile: ClassVar[bool] = False
    super_offload: ClassVar[bool] = False
    gathers_blocks: ClassVar[bool] = False

    @classmethod
    def unplaced(cls, settings: StrategySettings, *, tools: Tools = HOST_TOOLS) -> str | None:
        return unplaced(settings, stage=cls.stage, super_offload=cls.super_offload, tools=tools)

    @classmethod
    def unsupported(cls, settings: StrategySettings, *, tools: Tools = HOST_TOOLS) -> str | None:
        if settings.device != "cuda":
            return f"{cls.name} is compared on GPUs only"
        if reason := missing_package("deepspeed", DEEPSPEED, tools=tools):
            return reason
        if settings.compile == "block" and cls.stage == 3 and not cls.gathers_blocks:
            return "DeepSpeed ZeRO-3 gathers inside blocks, module by module: use --compile whole or deepspeed3_leaves"
        if cls.stage == 0 and settings.precision == "fp16":
            return "DeepSpeed's engine scales no loss at stage 0, though its fp16 optimizer unscales: use bf16 or fp32"
        if cls.stage == 0 and not fuses_with_torch(settings, stage=cls.stage):
            what = "DeepSpeed's FusedAdam, which its stage 0 needs,"
            return missing_compiler(what, tools=tools) or abandoned_build(what, "fused_adam", tools=tools)
        return None

    def build(self, model_factory: ModelFactory) -> None:
        self._determinism = Determinism(self.settings)
        self._lease = ProcessGroupLease(self.settings, strategy=self.name)
        make_architectures_readable(os.environ, capability=gpu_capability())
        import deepspeed

        deepspeed.utils.logger.setLevel("ERROR")
        self._compiler = Compiler(self.settings)
        self._traffic = StepTraffic()
        model = prepare_model(model_factory, self.settings)
        if self.settings.compile == "block":
            self._compiler.apply(model)
        initial = _copies(model) if self.settings.deterministic else None
        self._swap_folder = (
            LockedFolder(self.settings.nvme_paths[0], prefix="zerobench-swap-")
            if self.settings.offload in NVME_OFFLOADS
            else None
        )
        numels = [p.numel() for p in model.parameters()]
        parameter_count = sum(numels)
        self._check_room(parameter_count)
        config = deepspeed_config(
            self.settings,
            stage=self.stage,
            parameter_count=parameter_count,
            largest_numel=max(numels),
            leaf_classes=self._leaf_classes(model),
            deepcompile=self.deepcompile,
            super_offload=self.super_offload,
            swap_folder=self._swap_folder.path if self._swap_folder else None,
        )
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=config,
            optimizer=self._make_optimizer if "optimizer" not in config else None,
        )
        self._engine.train()
        if self.stage == 0:
            undo_first_step(self._engine)
        # DeepSpeed's masters start from the rounded parameters, other rows' do not.
        if initial is not None:
            set_masters(self._engine, initial)
        self._stepped = False
        self._gradient_bytes: dict[str, int] = {}  # by tier
        self._compile()

    def _check_room(self, parameter_count: int) -> None:
        """Raise MemoryError where what the stage needs besides usual memory is not there."""

    def _leaf_classes(self, model: nn.Module) -> list[str]:
        """Return the names of the classes that stage 3 gathers as one, with one pair of hooks."""
        kinds = {type(block) for block in repeated_blocks(model)} if self.gathers_blocks else set()
        return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)

    def _make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return make_adamw(parameters, self.settings.optimizer)

    def _compile(self) -> None:
        if self.settings.compile == "whole":
            self._engine.compile(backend=self._compiler.backend)

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        self._traffic.begin_step()
        loss, grad_norm = self._run(micro_batches, norm=norm, clock=NoClock())
        applied = self._engine.was_step_applied() if norm else None
        return StepResult(loss=loss, grad_norm=grad_norm, applied=applied)

    def _run(
        self, micro_batches: Sequence[Batch], *, norm: bool, clock: Clock
    ) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        losses, grad_norm = [], None
        for index, batch in enumerate(micro_batches):
            loss = self._engine(**batch).loss
            clock.lap("forward")
            self._engine.backward(loss)
            losses.append(loss.detach())
            clock.lap("backward")
            if not self._gradient_bytes and index == len(micro_batches) - 1:
                held = held_bytes(self._engine)
                self._gradient_bytes = {tier: held[tier].get("gradients", 0) for tier in held}
            if norm and not hasattr(self._engine.optimizer, "_global_grad_norm"):  # stage 0 in fp32
                grad_norm = total_norm([p.grad for p in self._engine.parameters() if p.grad is not None])
            self._engine.step()  # a no-op before the accumulation boundary
            clock.lap("optimizer")
        self._stepped = True
        self._compiler.count_step()
        if norm and grad_norm is None:
            grad_norm = self._engine.get_global_grad_norm()
        return mean_of(losses), grad_norm

    def applied_steps(self) -> int | None:
        if self.settings.precision != "fp16":
            return None
        return self._engine.global_steps - self._engine.skipped_steps

    def evaluate(self, batches: Sequence[Batch]) -> float | None:
        with self._compiler.eagerly():
            return mean_loss(self._engine, batches)

    def module(self) -> nn.Module:
        return self._engine.module

    def dtypes(self) -> Dtypes:
        return dtypes_beside_masters(self.settings)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return masters(self._engine)

    def first_moments(self) -> dict[str, torch.Tensor]:
        return moments(self._engine, stepped=self._stepped)

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        held = held_bytes(self._engine)
        for tier, gradients in self._gradient_bytes.items():
            held[tier]["gradients"] = gradients
        return {tier: categories for tier, categories in held.items() if any(categories.values())}

    def communicator(self) -> str | None:
        return backend_of(torch_device(self.settings)) if self.settings.world_size > 1 else None

    def communication_bytes(self) -> dict[str, int] | None:
        return self._traffic.moved_bytes()

    def compiled_graphs(self) -> float | None:
        return self._compiler.graphs_per_step()

    def reset_counters(self) -> None:
        self._compiler.reset()
        self._traffic.reset()

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        clock = phase_clock(torch_device(self.settings))
        self._run(micro_batches, norm=False, clock=clock)
        return clock.phases_ms

    def close(self) -> None:
        from deepspeed.utils import groups

        self._determinism.restore()
        self._engine.destroy()
        del self._engine
        if self._swap_folder is not None:
            self._swap_folder.close()
        self._lease.close()
        groups._release_process_group_references()  # else the next engine of this process would use dead groups


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


class DeepSpeed0Strategy(DeepSpeedStrategy):
    name = "deepspeed0"
    stage = 0


class DeepSpeed1Strategy(DeepSpeedStrategy):
    name = "deepspeed1"
    stage = 1


class DeepSpeed2Strategy(DeepSpeedStrategy):
    name = "deepspeed2"
    stage = 2


class DeepSpeed3Strategy(DeepSpeedStrategy):
    name = "deepspeed3"
    stage = 3


class DeepSpeed3LeavesStrategy(DeepSpeed3Strategy):
    """Every block is a leaf module: gathered as one instead of module by module, with fewer calls of Python."""

    name = "deepspeed3_leaves"
    gathers_blocks = True

    @classmethod
    def unplaced(cls, settings: StrategySettings, *, tools: Tools = HOST_TOOLS) -> str | None:
        if settings.offload != "none":
            return "leaf modules are compared with all state on the GPU: use deepspeed1, deepspeed2 or deepspeed3"
        return super().unplaced(settings, tools=tools)
