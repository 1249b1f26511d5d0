"""zerobench's own engine at ZeRO stages 0 to 3: one class a stage, all through ``zerobench.initialize``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import nn

from zerobench.engine.config import Config, parse
from zerobench.errors import ConfigError
from zerobench.host.io_settings import io_choice
from zerobench.models.materialise import materialise
from zerobench.strategies.base import (
    NVME_OFFLOADS,
    Batch,
    Dtypes,
    ModelFactory,
    StepResult,
    Strategy,
    StrategySettings,
    Transfers,
)
from zerobench.strategies.clock import Clock, NoClock, Phases, phase_clock
from zerobench.strategies.compiled import Compiler
from zerobench.strategies.merging import merge
from zerobench.strategies.shared import Determinism, mean_loss, mean_of, prepare_model, torch_device
from zerobench.strategies.traffic import Collective, Count, TrafficClock
from zerobench.strategies.zero_traffic import engine_collectives


def engine_config(settings: StrategySettings, *, stage: int) -> dict[str, Any]:
    """The configuration for ``zerobench.initialize``: the settings, with ``settings.options`` over them."""
    optimizer = settings.optimizer
    config: dict[str, Any] = {
        "stage": stage,
        "precision": settings.precision,
        "gradient_accumulation_steps": settings.grad_accum,
        "gradient_clipping": settings.clip,
        "optimizer": {
            "type": "adamw",
            "lr": optimizer.lr,
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
        "loss_scale": asdict(settings.loss_scale),
        "timeout_s": settings.timeout_s,
        "rendezvous": settings.rendezvous,
        "rank": settings.rank,
        "world_size": settings.world_size,
        "local_rank": settings.local_rank,
        "local_world_size": settings.local_world_size,
    }
    config |= placement(settings)
    merged = merge(config, settings.options)
    for key in ("stage", "gradient_accumulation_steps"):  # the row's name and its batches depend on these
        if merged[key] != config[key]:
            raise ConfigError(
                f"the configuration has {key} {merged[key]} and this row runs {config[key]}: remove {key} from it "
                "or make them equal"
            )
    return merged


def placement(settings: StrategySettings) -> dict[str, Any]:
    """Return where state lives and when it is updated, as keys of the engine's configuration; leave out keys that add
    nothing."""
    config: dict[str, Any] = {}
    if settings.optimizer_in_backward:
        config["optimizer_in_backward"] = True
    if settings.cpus is not None:
        config["cpus"] = list(settings.cpus)
    if settings.offload == "none":
        return config
    section: dict[str, Any] = {"device": "nvme" if settings.offload in NVME_OFFLOADS else "cpu"}
    if settings.offload_ratio is not None:
        section["ratio"] = settings.offload_ratio
    if settings.offload_ratio == "auto" and settings.device_memory_bytes is not None:
        section["device_memory_bytes"] = settings.device_memory_bytes
    if settings.offload in NVME_OFFLOADS:
        section["nvme_path"] = list(settings.nvme_paths)
        if settings.host_memory_bytes is not None:
            section["host_memory_bytes"] = settings.host_memory_bytes
    config["offload_optimizer"] = section
    if settings.offload in ("cpu_full", "nvme_full"):
        config["offload_param"] = {"device": "nvme" if settings.offload == "nvme_full" else "cpu"}
    return config


class ZeroStrategy(Strategy):
    """The engine at the stage that a subclass names."""

    stage: ClassVar[int]

    @classmethod
    def unplaced(cls, settings: StrategySettings) -> str | None:
        """The engine's own configuration knows what it can do."""
        missing = [key for key in placement(settings) if key not in Config.model_fields]
        if missing:
            return f"this build of the engine has no {' and no '.join(missing)}"
        try:
            parse(engine_config(settings, stage=cls.stage))
        except ConfigError as error:
            return f"the engine cannot run it: {error}"
        return None

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        if settings.compile == "whole" and cls.stage == 3:
            return (
                "stage 3 gathers block by block, which a single compiled graph cannot do: use --compile block"
            )
        return None

    def build(self, model_factory: ModelFactory) -> None:
        from zerobench.engine.engine import initialize

        self._determinism = Determinism(self.settings)
        self._compiler = Compiler(self.settings)
        model = prepare_model(model_factory, self.settings, on_meta=True)
        whole = self.settings.compile == "whole"
        if not whole:
            self._compiler.apply(model)
        self._engine = initialize(
            model=model, config=engine_config(self.settings, stage=self.stage), materialise=materialise
        )
        if whole:
            self._engine.compile(backend=self._compiler.backend)
        self._communication_ms = self._waited_ms = self._waited_for_files_ms = 0.0
        self._collectives: list[Collective] | None = None
        self._is_recorded = False  # by record_timeline
        self.settle()

    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        loss = self._run(micro_batches, clock=NoClock())
        if not norm:
            return StepResult(loss=loss, grad_norm=None, applied=None)
        return StepResult(
            loss=loss,
            grad_norm=self._engine.get_global_grad_norm(),
            applied=self._engine.was_step_applied(),
        )

    def _run(self, micro_batches: Sequence[Batch], *, clock: Clock) -> torch.Tensor:
        losses = []
        for batch in micro_batches:
            loss = self._engine(**batch).loss
            clock.lap("forward")
            self._engine.backward(loss)
            losses.append(loss.detach())
            clock.lap("backward")
            self._engine.step()  # a no-op before the accumulation boundary
            clock.lap("optimizer")
        self._compiler.count_step()
        return mean_of(losses)

    def applied_steps(self) -> int | None:
        return self._engine.global_steps if self.settings.precision == "fp16" else None

    def evaluate(self, batches: Sequence[Batch]) -> float:
        with self._compiler.eagerly():
            return mean_loss(self._engine.module, batches)

    def module(self) -> nn.Module:
        return self._engine.module

    def dtypes(self) -> Dtypes:
        return Dtypes(**self._engine.dtypes())

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return self._engine.full_parameters()

    def first_moments(self) -> dict[str, torch.Tensor]:
        moments = self._engine.full_optimizer_state("exp_avg")
        named = self._engine.module.named_parameters()
        return {
            name: moments[name] if name in moments else torch.zeros(parameter.shape)
            for name, parameter in named
        }

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        return self._engine.memory_bytes()

    def communicator(self) -> str | None:
        if self.settings.world_size == 1:
            return None
        return "; ".join(filter(None, (self._engine.communicator, self._engine.communicator_note)))

    def update_cpus(self) -> str | None:
        return self._engine.update_cpus

    def communication_bytes(self) -> dict[str, int] | None:
        return self._engine.communication_by_collective()

    def transfers(self) -> Transfers | None:
        if self.settings.offload == "none":
            return None
        moved = self._moved_bytes()
        since = {name: moved[name] - value for name, value in (self._moved_at_settle or {}).items()}
        swapped = self._engine.swap_stats()
        on_nvme = self.settings.offload in NVME_OFFLOADS
        pinned = self._engine.offload_pinned()
        return Transfers(
            to_host_bytes=since.get("to_host_bytes"),
            to_device_bytes=since.get("to_device_bytes"),
            nvme_read_bytes=since.get("read_bytes") if on_nvme else None,
            nvme_written_bytes=since.get("written_bytes") if on_nvme else None,
            io_engine="; ".join([self._io_text(swapped["engine"]), *swapped["notes"]]) if on_nvme else None,
            pinned_bytes=pinned["mapped_bytes"],
            pinned_requested_bytes=pinned["requested_bytes"],
            offload_ratio=self._engine.offload_ratio,
            chunk_numel=self._engine.offload_chunk_numel,
        )

    def _io_text(self, engine: str) -> str:
        """All that files are read and written with; the engine is the one that does it."""
        offload = self._engine.config.offload_optimizer
        assert offload is not None
        return io_choice(offload.nvme_path, dict(offload))._replace(engine=engine).text

    def _moved_bytes(self) -> dict[str, int]:
        """Over the link and of files since the engine was made, once no update is under way and what can be read ahead
        was read."""
        moved = self._engine.offload_traffic()  # which waits for that, so files are asked after it
        swapped = self._engine.swap_stats()
        return moved | {name: swapped[name] for name in ("read_bytes", "written_bytes")}

    def settle(self) -> None:
        """Count transfers from here. If ratio auto has not chosen yet, the next step places the state, which is not
        traffic of steps."""
        moved = self._moved_bytes()
        self._moved_at_settle = None if self._engine.offload_ratio is None else moved

    def compiled_graphs(self) -> float | None:
        return self._compiler.graphs_per_step()

    def reset_counters(self) -> None:
        self._compiler.reset()
        self._engine.reset_counters()
        self._communication_ms = 0.0

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        exposed = {"exposed_communication": self._take_exposed_ms}
        if self.settings.offload in NVME_OFFLOADS:  # first: what is left of the wait is the update's
            exposed["exposed_io"] = self._take_waited_for_files_ms
        if self.settings.offload != "none":
            exposed["exposed_offload"] = self._take_waited_ms
        device = torch_device(self.settings)
        clock = phase_clock(device, exposed)
        self._take_waited_for_files_ms()
        traffic = TrafficClock(clock, self._moved_by_collective)
        with nullcontext() if self._is_recorded else self._engine.record_timeline() as spans:
            self._run(micro_batches, clock=traffic)
        if not self._is_recorded:
            timed = spans if device.type == "cpu" else None
            units, world_size = self._engine.units(), self.settings.world_size
            self._collectives = engine_collectives(traffic, timed, units, world_size)
        phases = clock.phases_ms
        if isinstance(phases, Phases) and self.settings.offload in NVME_OFFLOADS:
            phases.files_ms = self._take_waited_for_files_ms()
        return phases

    def _moved_by_collective(self) -> dict[str, Count]:
        return {
            name: Count(bytes=moved) for name, moved in self._engine.communication_by_collective().items()
        }

    def collectives(self) -> list[Collective] | None:
        return self._collectives

    @contextmanager
    def record_timeline(self) -> Iterator[list[tuple[str, str, str, int, int]] | None]:
        self._is_recorded = True  # the engine has one recording at a time
        try:
            with self._engine.record_timeline() as spans:
                yield spans
        finally:
            self._is_recorded = False

    def streams(self) -> dict[str, int]:
        return self._engine.streams()

    def _take_exposed_ms(self) -> float:
        before, self._communication_ms = self._communication_ms, self._engine.communication_ms()
        return self._communication_ms - before

    def _take_waited_ms(self) -> float:
        """For updates, but for their own waits for files."""
        engine = self._engine
        now_ms = engine.offload_waited_ms() - engine.offload_waited_for_files_ms()
        before, self._waited_ms = self._waited_ms, now_ms
        return self._waited_ms - before

    def _take_waited_for_files_ms(self) -> float:
        before, self._waited_for_files_ms = (
            self._waited_for_files_ms,
            self._engine.offload_waited_for_files_ms(),
        )
        return self._waited_for_files_ms - before

    def close(self) -> None:
        self._determinism.restore()
        self._engine.close()


class Zero0Strategy(ZeroStrategy):
    name = "zero0"
    stage = 0


class Zero1Strategy(ZeroStrategy):
    name = "zero1"
    stage = 1


class Zero2Strategy(ZeroStrategy):
    name = "zero2"
    stage = 2


class Zero3Strategy(ZeroStrategy):
    name = "zero3"
    stage = 3
