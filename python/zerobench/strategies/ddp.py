"""DistributedDataParallel; bf16 and fp16 as its users have them: fp32 parameters under autocast, or low precision
parameters beside fp32 masters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from zerobench.strategies.base import Batch, Dtypes, StrategySettings
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.shared import (
    autocast,
    cast_parameters,
    dtypes_beside_masters,
    precision_dtype,
    storage_bytes,
)
from zerobench.strategies.traffic import Collective

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class DDPStrategy(PeerStrategy):
    """Replicated parameters, gradients all-reduced in buckets while backward runs."""

    name = "ddp"

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._exposed: _ExposedReduction | None = None
        self._waited_ms: float | None = None
        self._steps = 0
        self._ddp = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            # no_sync under a static graph is an internal error of DDP, and dynamo's splitting at buckets knows none
            static_graph=self.settings.grad_accum == 1 and self.settings.compile != "whole",
        )
        # Or rank 0 sends them before every forward. They are equal at the start, and no model here changes its own.
        self._ddp.broadcast_buffers = False
        return self._ddp

    def _reduce_dtype(self) -> torch.dtype:
        return torch.float32

    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._steps += is_last
        return nullcontext() if is_last else self._ddp.no_sync()

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.settings)

    def _after_step(self) -> None:
        # Kept where micro-batches accumulate, else the first ones' gradients would lie beside the buckets.
        self._optimizer.zero_grad(set_to_none=self.settings.grad_accum == 1)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._ddp.module.named_parameters())

    def module(self) -> nn.Module:
        return self._ddp.module

    def dtypes(self) -> Dtypes:
        compute, reduce = (
            str(dtype).removeprefix("torch.")
            for dtype in (precision_dtype(self.settings), self._reduce_dtype())
        )
        return Dtypes(param="float32", compute=compute, reduce=reduce, master="float32", state="float32")

    def communication_bytes(self) -> dict[str, int] | None:
        """All-reduces of every gradient, once a step, at 2 (n - 1) / n of their bytes."""
        return {"all_reduce": self._steps * self._reduced_bytes()}

    def _reduced_bytes(self) -> int:
        world_size = self.settings.world_size
        numel = sum(p.numel() for p in self._ddp.parameters() if p.requires_grad)
        return 2 * (world_size - 1) * numel * self._reduce_dtype().itemsize // world_size

    def collectives(self) -> list[Collective] | None:
        """Return the all-reduces of buckets, which run beside the last micro-batch's backward."""
        return [
            Collective(
                phase="backward",
                name="all_reduce",
                bytes=self._reduced_bytes(),
                calls=bucket_num(self._ddp),
                ms=self._waited_ms,
            )
        ]

    def profiled_step(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        phases = super().profiled_step(micro_batches)
        self._waited_ms = phases.get("exposed_communication")
        return phases

    def reset_counters(self) -> None:
        super().reset_counters()
        self._steps = 0

    def _take_exposed_ms(self) -> Callable[[], float] | None:
        if self._exposed is None:
            self._exposed = _ExposedReduction(_all_reduce_mean)
            self._ddp.register_comm_hook(None, self._exposed.hook)
        return self._exposed.take_ms

    def close(self) -> None:
        del self._ddp
        super().close()


class DDPCompressStrategy(DDPStrategy):
    """DDP whose gradients are all-reduced in the precision's dtype (bf16_compress_hook, fp16_compress_hook)."""

    name = "ddp_compress"

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        if settings.precision == "fp32":
            return "ddp_compress has nothing to compress in fp32: ddp is the same"
        return super().unsupported(settings)

    def _wrap(self, model: nn.Module) -> nn.Module:
        ddp = super()._wrap(model)
        hook: Hook = {
            torch.bfloat16: default_hooks.bf16_compress_hook,
            torch.float16: default_hooks.fp16_compress_hook,
        }[self._reduce_dtype()]
        if self.settings.device == "cpu":
            self._exposed = _ExposedReduction(hook)
            hook = self._exposed.hook
        self._ddp.register_comm_hook(None, hook)
        return ddp

    def _reduce_dtype(self) -> torch.dtype:
        return precision_dtype(self.settings)


class DDPMasterStrategy(DDPStrategy):
    """DDP of a model whose parameters have the precision's dtype, beside fp32 masters that AdamW updates: the dtypes of
    engines that keep masters. Micro-batches accumulate in the gradients' own dtype, as DDP does it."""

    name = "ddp_master"

    @classmethod
    def unsupported(cls, settings: StrategySettings) -> str | None:
        if settings.precision == "fp32":
            return "ddp_master keeps no low-precision copy in fp32 and is the same as ddp: use ddp"
        return super().unsupported(settings)

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._masters = {
            name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()
        }
        cast_parameters(model, precision_dtype(self.settings))
        return super()._wrap(model)

    def _trained(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of what forward reads and its master."""
        pairs = zip(self._ddp.module.parameters(), self._masters.values(), strict=True)
        return [(parameter, master) for parameter, master in pairs if parameter.requires_grad]

    def _optimized(self) -> list[nn.Parameter]:
        return [master for _, master in self._trained()]

    def _held_gradient_bytes(self) -> int:
        """With the masters', which are made from them."""
        masters = sum(master.nbytes for parameter, master in self._trained() if parameter.grad is not None)
        return super()._held_gradient_bytes() + masters

    def _update(self, *, norm: bool) -> tuple[torch.Tensor | None, bool | None]:
        pairs = self._trained()
        arrived = [(p.grad, master) for p, master in pairs if p.grad is not None]
        for _, master in arrived:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_(
            [m.grad for _, m in arrived if m.grad is not None], [grad for grad, _ in arrived]
        )
        found = super()._update(norm=norm)
        with torch.no_grad():
            torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])
        return found

    def _after_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._ddp.zero_grad(set_to_none=self.settings.grad_accum == 1)

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _reduce_dtype(self) -> torch.dtype:
        return precision_dtype(self.settings)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def dtypes(self) -> Dtypes:
        return dtypes_beside_masters(self.settings)

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        device = super().memory_bytes()["device"]
        return {
            "device": {
                **device,
                "parameters": storage_bytes(self._ddp.parameters()),
                "master": device["parameters"],
            }
        }

    def close(self) -> None:
        del self._masters
        super().close()


def bucket_num(ddp: DistributedDataParallel) -> int | None:
    """Return how many buckets DDP reduces its gradients in, or None before it has chosen them."""
    facts = ddp._get_ddp_logging_data()
    sizes = facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes") or ""
    return len(sizes.split(",")) if sizes else None


def _all_reduce_mean(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over all ranks, as DDP does without a hook."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


class _ExposedReduction:
    """A communication hook around another that notes when the last bucket became ready (no gradient is left to compute
    then) and when the last reduction ended. Between the two, backward only waits."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._lock = threading.Lock()  # buckets become ready on autograd's thread and end on gloo's
        self._ready_s = self._done_s = 0.0

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations, and ours are text
        self._ready_s = time.perf_counter()
        return self._hook(state, bucket).then(self._done)

    def _done(self, future: torch.futures.Future) -> torch.Tensor:
        with self._lock:
            self._done_s = max(self._done_s, time.perf_counter())
        return future.value()

    def take_ms(self) -> float:
        with self._lock:
            exposed_ms = max(self._done_s - self._ready_s, 0.0) * 1e3
            self._ready_s = self._done_s = 0.0
        return exposed_ms
