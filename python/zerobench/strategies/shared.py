"""What several strategies need: AdamW, clipping, the loss scale, clocks, byte counts, checksums."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerobench.errors import ConfigError
from zerobench.strategies.base import Batch, OptimizerSettings, StrategySettings

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_STEPS = 1000
LOSS_SCALE_BACKOFF = 0.5
MIN_LOSS_SCALE = 1.0


def precision_dtype(settings: StrategySettings) -> torch.dtype:
    try:
        return PRECISION_DTYPES[settings.precision]
    except KeyError:
        known = ", ".join(PRECISION_DTYPES)
        raise ConfigError(f"unknown precision {settings.precision!r}: known: {known}") from None


def prepare_model(model_factory: Callable[[], nn.Module], settings: StrategySettings) -> nn.Module:
    """The model in training mode, with gradient checkpointing as asked."""
    model = model_factory().train()
    if settings.checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                f"{type(model).__name__} has no gradient_checkpointing_enable: leave out --checkpointing"
            )
        enable(use_reentrant=False)
    return model


def make_adamw(parameters: Iterable[torch.Tensor], settings: OptimizerSettings) -> torch.optim.AdamW:
    """torch's fastest AdamW on CPU and CUDA, for plain tensors and DTensors."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_, without a host synchronisation."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class LossScale:
    """Dynamic loss scale for fp16: an overflow skips the step and halves it, enough good steps double it."""

    def __init__(self) -> None:
        self.scale = INITIAL_LOSS_SCALE
        self._good_steps = 0

    def update(self, *, finite: bool) -> None:
        if not finite:
            self.scale = max(self.scale * LOSS_SCALE_BACKOFF, MIN_LOSS_SCALE)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == LOSS_SCALE_GROWTH_STEPS:
            self.scale *= 2.0
            self._good_steps = 0


class NoClock:
    """Stands in for PhaseClock in steps that nobody takes apart."""

    def lap(self, phase: str) -> None:
        pass


class PhaseClock:
    """Host time by phase. ``take_exposed_ms`` gives the communication time that no computation hid since its
    last call; it moves from the phase that it fell into to a phase of its own, so that the phases add up."""

    def __init__(self, take_exposed_ms: Callable[[], float] | None = None) -> None:
        self.phases_ms = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._take_exposed_ms = take_exposed_ms
        if take_exposed_ms is not None:
            self.phases_ms["exposed_communication"] = 0.0
            take_exposed_ms()
        self._last_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Everything since the last lap belongs to ``phase``."""
        now_s = time.perf_counter()
        elapsed_ms = (now_s - self._last_s) * 1e3
        self._last_s = now_s
        if self._take_exposed_ms is not None:
            exposed_ms = min(self._take_exposed_ms(), elapsed_ms)
            self.phases_ms["exposed_communication"] += exposed_ms
            elapsed_ms -= exposed_ms
        self.phases_ms[phase] += elapsed_ms


Clock = NoClock | PhaseClock


class Determinism:
    """torch's deterministic algorithms from construction to ``restore``, where asked for."""

    def __init__(self, enabled: bool) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        if enabled:
            torch.use_deterministic_algorithms(True)

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self._before)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor as a new fp32 CPU tensor. Collective for a DTensor."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    return whole.to(device="cpu", dtype=torch.float32, copy=True)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind what this rank holds of ``tensors``."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors if tensor is not None)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_tensors(optimizer: torch.optim.Optimizer, key: str) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values() if key in state]


def first_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Full exp_avg of a parameter, zeros before its first step. Collective for a DTensor."""
    state = optimizer.state.get(parameter, {})
    return full_fp32(state["exp_avg"]) if "exp_avg" in state else torch.zeros(parameter.shape)


def mean_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Mean loss in eval mode without gradients; the model is in training mode again afterwards."""
    model.eval()
    try:
        with torch.no_grad():
            return torch.stack([model(**batch).loss.float() for batch in batches]).mean().item()
    finally:
        model.train()


def checksum(parameters: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over sorted names, shapes and fp32 little-endian bytes: equal exactly when all bits are."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        tensor = parameters[name].detach().to(device="cpu", dtype=torch.float32).contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()
