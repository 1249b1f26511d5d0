"""The one protocol that every way to train follows: ours and each peer.

A strategy object lives in one rank's process. The order of calls is ``build``, then any number of ``step`` and
``evaluate``, with the readers (``full_parameters``, ``first_moments``, ``memory_bytes``, ...) in between, then
``close``. Readers that gather are collective: every rank calls them in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from zerobench.strategies.catalogue import OWN, Facts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerobench.strategies.traffic import Collective

Batch = Mapping[str, "torch.Tensor"]
"""Keyword arguments of the model's forward, such as ``input_ids`` and ``labels``, both (batch_size, seq_length) int64.
``models.open_batches`` makes those of a model."""


class ModelFactory(Protocol):
    """Makes the fp32 model, equal on every rank. On the ``"meta"`` device its parameters have no memory yet, and
    ``zerobench.models.materialise.materialise`` gives it to parts of them."""

    def __call__(self, *, device: str | None = None) -> nn.Module: ...


NVME_OFFLOADS = ("nvme", "nvme_full")
COMPILE_MODES = ("none", "block", "whole")
"""What torch.compile compiles: nothing, each repeated block, or the model."""


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Effective dtypes by role, as torch names without the prefix ("float32", "bfloat16", "float16")."""

    param: str  # what forward and backward read
    compute: str  # what matrix products run in (differs from param under autocast)
    reduce: str  # what gradients are summed in across ranks
    master: str  # what the optimizer updates
    state: str  # exp_avg and exp_avg_sq
    accumulate: str | None = None  # what micro-batches are summed in; None where a peer decides it


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW hyperparameters, equal for every strategy of a comparison."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True, kw_only=True)
class LossScaleSettings:
    """The dynamic loss scale of fp16, equal for every strategy of a comparison."""

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval_steps: int = 1000  # good steps until the scale grows


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """Settings that a strategy is asked to run with. Resolved: no "auto" is left."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str  # unique text of this run; ranks of one host meet by it (shm communicator)
    precision: str  # "fp32", "bf16" or "fp16": the dtype of param, compute and reduce
    batch_size: int  # per rank and micro-batch
    seq_length: int
    grad_accum: int = 1
    clip: float | None = None  # maximum global gradient norm
    checkpointing: bool = False  # gradient checkpointing of every block
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)
    timeout_s: float = 300.0
    deterministic: bool = False  # verification runs under deterministic algorithms
    device: str = "cpu"  # "cpu", or "cuda": cuda:{local_rank}
    compile: str = "none"  # one of COMPILE_MODES
    offload: str = "none"  # one of OFFLOADS
    # Share of the optimizer state that leaves the device; None: all.
    offload_ratio: float | Literal["auto"] | None = None
    nvme_paths: tuple[str, ...] = ()
    host_memory_bytes: int | None = None  # of this rank, for what is offloaded; None: what the host has
    device_memory_bytes: int | None = None  # that this rank may use of its GPU; None: all of it
    optimizer_in_backward: bool = False
    cpus: tuple[int, ...] | None = None  # that this rank is bound to, where it is
    pipeline_stages: int | None = None  # of a strategy that pipelines, as the next two
    pipeline_schedule: str | None = None
    micro_batches: int | None = None  # that a pipeline runs in a step
    # Of a configuration file (--config): zerobench's keys for ours, DeepSpeed's for DeepSpeed.
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. ``loss`` is this rank's mean loss over its micro-batches, unscaled (0-dim tensor)."""

    loss: torch.Tensor
    grad_norm: float | torch.Tensor | None  # global, before clipping; None where it was not computed
    applied: bool | None = True  # False when fp16 overflow skipped the update; None where nobody asked for it


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Cost of offloaded state on this rank: bytes moved since ``settle``, and memory held for moving them. None if a
    value is not known."""

    to_host_bytes: int | None = None  # over the device's link
    to_device_bytes: int | None = None
    nvme_read_bytes: int | None = None
    nvme_written_bytes: int | None = None
    pinned_bytes: int | None = None  # host memory for it, as taken; page-locked beside a GPU
    pinned_requested_bytes: int | None = None
    offload_ratio: float | None = None  # share of the optimizer state that is off the device
    io_engine: str | None = None  # what reads and writes files, and how
    chunk_numel: int | None = None  # elements that one stage of the pipeline works on


@dataclass(frozen=True, kw_only=True)
class ScheduleTimes:
    """Times of a pipeline's schedule on this rank: of forward and backward, and of the whole schedule, which begins at
    once on all ranks of the pipeline."""

    busy_ms: float
    whole_ms: float


class Strategy(ABC):
    """One way to train, in one rank's process."""

    name: ClassVar[str]  # what --strategies takes: "single", "zero0", "ddp", ...
    stage: ClassVar[int | None] = None  # ZeRO stage, for ours and for peers that have one
    # What a strategy of one's own declares of itself; the catalogue has the facts of built-in ones.
    facts: ClassVar[Facts] = OWN
    updates: ClassVar[bool] = True  # False: it never changes parameters, so there is nothing to verify

    def __init__(self, settings: StrategySettings) -> None:
        self.settings = settings

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        """Why these settings cannot run (row status ``skipped``), or None. Called before anything is built."""
        return None

    @classmethod
    def unplaced(cls, settings: StrategySettings) -> str | None:
        """Why state cannot live where the settings ask, or not be updated when they ask (row status ``skipped``). A
        strategy that can do more than this overrides it."""
        if settings.offload != "none":
            return f"{cls.name} keeps all of its state on its device"
        if settings.optimizer_in_backward:
            return f"{cls.name} updates in its optimizer step, never during backward"
        return None

    @abstractmethod
    def build(self, model_factory: ModelFactory) -> None:
        """Make model (fp32, seeded, equal on every rank), wrapper and optimizer. Collective."""

    @abstractmethod
    def step(self, micro_batches: Sequence[Batch], *, norm: bool = False) -> StepResult:
        """Forward and backward over ``grad_accum`` micro-batches, one optimizer step. ``norm`` asks for ``grad_norm``
        and ``applied``, for which the host may have to wait; without it no step waits for the device."""

    def step_without_gradients(self, micro_batches: Sequence[Batch], *, keep_shards: bool = False) -> bool:
        """Forward and backward that drop each gradient when it arrives, so that the peak of their memory is activations
        beside parameters; or keep as much of it as a rank's shard. False where there is no such step: the strategy
        keeps gradients or shares them."""
        return False

    def applied_steps(self) -> int | None:
        """Optimizer steps that changed parameters so far, where fp16 overflow may skip some; None where none is skipped
        or it cannot be told. Waits for the device."""
        return None

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> float | None:
        """Mean loss over this rank's batches without gradients, None where a peer cannot. Collective as forward is."""

    def module(self) -> nn.Module | None:
        """The model inside wrappers, so that its parameters have the plain model's names; None where forward reads what
        no module holds."""
        return None

    @abstractmethod
    def dtypes(self) -> Dtypes: ...

    @abstractmethod
    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Full parameters by name as fp32 CPU copies: the masters where they exist. Collective; same on every rank."""

    @abstractmethod
    def first_moments(self) -> dict[str, torch.Tensor]:
        """Full exp_avg by parameter name as fp32 CPU copies, zeros where a parameter has none. Collective."""

    @abstractmethod
    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """{tier: {category: bytes}} that this rank holds at peak, by the ledger's names."""

    def offloaded_tensor_bytes(self) -> int:
        """Bytes of offloaded state that this rank keeps throughout as torch's tensors on a CPU rank, whose allocator
        counts them as the device's."""
        return 0

    def communicator(self) -> str | None:
        """Return what moves this strategy's data between ranks ("shm", "gloo", "nccl", ...); None if nothing is
        moved."""
        return None

    def update_cpus(self) -> str | None:
        """The threads and CPUs that update optimizer state, and why it is these; None where there are none or it cannot
        be told."""
        return None

    def communication_bytes(self) -> dict[str, int] | None:
        """Bytes this rank moved since ``reset_counters`` by collective (as in docs/reference/metrics.md), else None."""
        return None

    def transfers(self) -> Transfers | None:
        """Return the cost of offloaded state since ``settle``, after updates under way have ended; None if nothing is
        offloaded or known."""
        return None

    def compiled_graphs(self) -> float | None:
        """Compiled forward graphs executed per step since ``reset_counters`` (one a micro-batch where the whole model
        is one graph; recomputation counts again), None where nothing is compiled or it cannot be told."""
        return None

    def settle(self) -> None:  # noqa: B027 - most strategies' steps leave nothing to other threads
        """Wait for updates that earlier steps left under way; ``transfers`` counts from here."""

    def reset_counters(self) -> None:  # noqa: B027 - a strategy without counters has nothing to zero
        """Zero communication counters and memory peaks before a measured window."""

    @abstractmethod
    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        """One step with a clock around its parts: {"forward": ms, "backward": ms, "optimizer": ms} and, where it can be
        told, "exposed_communication" (time in which this rank only waited for or moved data of collectives; it is
        contained in the other phases' wall time and is subtracted from them, so that the phases add up)."""

    def collectives(self) -> list[Collective] | None:
        """Return the collectives of the latest profiled step by phase, or None where they cannot be told."""
        return None

    def record_timeline(self) -> AbstractContextManager[list[tuple[str, str, str, int, int]] | None]:
        """Return a block that records the strategy's own operations as ``Engine.record_timeline`` does; its value is
        None where the strategy knows none."""
        return nullcontext()

    def streams(self) -> dict[str, int]:
        """Return the CUDA streams that the strategy owns: native handles by lane of the engine."""
        return {}

    def schedule_times(self) -> ScheduleTimes | None:
        """Return the median times of a pipeline's schedule over the profiled steps, or None where there is none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free everything; never hangs when a peer is gone."""
