"""Functions that several strategies need: the model on its device, AdamW, clipping, the loss scale, byte counts,
checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from zerobench.errors import ConfigError
from zerobench.models import enable_checkpointing
from zerobench.strategies.base import Batch, Dtypes, ModelFactory, OptimizerSettings, StrategySettings

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_NORM_PIECE_NUMEL = 1 << 16


def precision_dtype(settings: StrategySettings) -> torch.dtype:
    try:
        return PRECISION_DTYPES[settings.precision]
    except KeyError:
        known = ", ".join(PRECISION_DTYPES)
        raise ConfigError(f"unknown precision {settings.precision!r}: known: {known}") from None


def dtypes_beside_masters(settings: StrategySettings) -> Dtypes:
    """The precision's dtype everywhere but in masters and optimizer state, which are fp32."""
    low = str(precision_dtype(settings)).removeprefix("torch.")
    return Dtypes(param=low, compute=low, reduce=low, master="float32", state="float32")


def torch_device(settings: StrategySettings) -> torch.device:
    """Return the device of this rank's model and batches."""
    if settings.device == "cuda":
        return torch.device("cuda", settings.local_rank)
    if settings.device != "cpu":
        raise ConfigError(f"unknown device {settings.device!r}: known: cpu, cuda")
    return torch.device("cpu")


def bind_device(settings: StrategySettings) -> torch.device:
    """This rank's device, made the current one. NVLink multicast stays off: NCCL reads that when it starts."""
    device = torch_device(settings)
    if device.type == "cuda":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(device)
    return device


def prepare_model(
    model_factory: ModelFactory, settings: StrategySettings, *, on_meta: bool = False
) -> nn.Module:
    """The fp32 model on this rank's device in training mode, with gradient checkpointing as asked; or with parameters
    ``on_meta``, for ``materialise`` to give memory where they are sharded.

    The factory seeds torch's generators itself. On CUDA it runs with the rank's GPU as the default device, so that
    modules which do not choose a device are made there; what a GPU draws depends on the seed and the kind of GPU only,
    so every strategy and rank of a comparison starts from the same bits."""
    device = bind_device(settings)
    with device if device.type == "cuda" else nullcontext():
        model = model_factory(device="meta") if on_meta else model_factory()
    if not any(parameter.is_meta for parameter in model.parameters()):
        model = model.to(device)
    model.train()
    if settings.checkpointing:
        enable_checkpointing(model)
    return model


def autocast(settings: StrategySettings) -> AbstractContextManager[object]:
    """Around forward, where fp32 parameters are multiplied in the precision's dtype."""
    dtype = precision_dtype(settings)
    return torch.autocast(settings.device, dtype=dtype) if dtype != torch.float32 else nullcontext()


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: ``Module.to`` would round buffers too, such as the frequencies of rotary embeddings, and train
    another model than strategies that keep them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


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


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Global L2 norm over all ranks' parts, a plain tensor beside them. On the host by pieces: torch adds up a whole
    tensor's squares in a few fp32 sums there, which is 6e-4 off at 15 million elements and 2 % at 160 million. A
    tensor's pieces in one call, which takes every thread. Collective for DTensors."""
    if not gradients or gradients[0].device.type != "cpu":
        norm = get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    norms, rests = [], []
    for tensor in gradients:
        flat = local_tensor(tensor).reshape(-1)
        piece_num = flat.numel() // _NORM_PIECE_NUMEL
        pieces, rest = flat.split((piece_num * _NORM_PIECE_NUMEL, flat.numel() % _NORM_PIECE_NUMEL))
        norms.append(torch.linalg.vector_norm(pieces.view(piece_num, _NORM_PIECE_NUMEL), dim=1))
        rests.append(rest)
    squares = torch.cat((*norms, torch.stack(torch._foreach_norm(rests)))).double().square().sum()
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(squares)
    return squares.sqrt().float()


def make_grad_scaler(
    settings: StrategySettings, kind: type[torch.amp.GradScaler] = torch.amp.GradScaler
) -> torch.amp.GradScaler | None:
    """The dynamic loss scale that fp16 needs; it stays on the device, so that no step waits for it."""
    if precision_dtype(settings) != torch.float16:
        return None
    asked = settings.loss_scale
    return kind(
        device=settings.device,
        init_scale=asked.initial_scale,
        growth_factor=asked.growth_factor,
        backoff_factor=asked.backoff_factor,
        growth_interval=asked.growth_interval_steps,
    )


def scaled_step(
    scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer, *, ask: bool
) -> bool | None:
    """Step the optimizer unless fp16 overflowed. Whether it was, or None where nobody asks: the answer is a number on
    the device, and the host would have to wait for it."""
    if scaler is None:
        optimizer.step()
        return True
    scale = scaler.get_scale() if ask else 0.0
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale if ask else None


def scaled_steps(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> int | None:
    """Steps that were not skipped; None where no loss is scaled. Fused AdamW counts those alone."""
    if scaler is None:
        return None
    counts = state_tensors(optimizer, "step")
    return int(torch.stack(counts).max()) if counts else 0


def mean_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(list(losses)).float().mean()


class Determinism:
    """torch's deterministic algorithms from construction to ``restore``, where asked for. A compiler's choices that
    hang on timings are pinned too (torch 2.10 and later know how)."""

    def __init__(self, settings: StrategySettings) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        self._pinned = False
        if not settings.deterministic:
            return
        if settings.device == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        if settings.compile != "none":
            self._pinned = self._pin(True)
        torch.use_deterministic_algorithms(True)

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self._before)
        if self._pinned:
            self._pin(False)

    @staticmethod
    def _pin(pinned: bool) -> bool:
        import torch._inductor.config as inductor

        known = hasattr(inductor, "deterministic")
        if known:
            inductor.deterministic = pinned
        return known


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
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
    """SHA-256 over sorted names, shapes and the SHA-256 of each one's fp32 little-endian bytes: equal exactly when all
    bits are. Tensors are hashed on as many cores as torch uses."""

    def of_bytes(name: str) -> bytes:
        tensor = parameters[name].detach().to(device="cpu", dtype=torch.float32).contiguous().reshape(-1)
        return hashlib.sha256(tensor.numpy().astype("<f4", copy=False).data).digest()

    names = sorted(parameters)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, bytes_digest in zip(names, pool.map(of_bytes, names), strict=True):
            digest.update(f"{name}{tuple(parameters[name].shape)}".encode())
            digest.update(bytes_digest)
    return digest.hexdigest()
