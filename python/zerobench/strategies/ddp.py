"""DistributedDataParallel over gloo; bf16 and fp16 as its users have them: fp32 parameters under autocast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerobench.strategies.base import Dtypes
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.shared import precision_dtype, storage_bytes


class DDPStrategy(PeerStrategy):
    """Replicated parameters, gradients all-reduced in buckets while backward runs."""

    name = "ddp"

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._exposed: _ExposedReduction | None = None
        self._steps = 0
        self._ddp = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            static_graph=self.settings.grad_accum
            == 1,  # no_sync under a static graph is an internal error of DDP
        )
        return self._ddp

    def _micro_batch(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._steps += is_last
        return nullcontext() if is_last else self._ddp.no_sync()

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = precision_dtype(self.settings)
        return torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext()

    def _after_step(self) -> None:
        # Kept where micro-batches accumulate, else the first ones' gradients would lie beside the buckets.
        self._optimizer.zero_grad(set_to_none=self.settings.grad_accum == 1)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._ddp.module.named_parameters())

    def dtypes(self) -> Dtypes:
        compute = str(precision_dtype(self.settings)).removeprefix("torch.")
        return Dtypes(param="float32", compute=compute, reduce="float32", master="float32", state="float32")

    def communication_bytes(self) -> int | None:
        """All-reduces of every gradient, once a step, at 2 (n - 1) / n of their bytes."""
        world_size = self.settings.world_size
        trained = [p for p in self._ddp.parameters() if p.requires_grad]
        return self._steps * 2 * (world_size - 1) * storage_bytes(trained) // world_size

    def reset_counters(self) -> None:
        super().reset_counters()
        self._steps = 0

    def _take_exposed_ms(self) -> Callable[[], float] | None:
        if self._exposed is None:
            self._exposed = _ExposedReduction(self.settings.world_size)
            self._ddp.register_comm_hook(None, self._exposed.hook)
        return self._exposed.take_ms

    def close(self) -> None:
        del self._ddp
        super().close()


class _ExposedReduction:
    """DDP's own all-reduce as a communication hook that notes when the last bucket became ready (no gradient is
    left to compute then) and when the last reduction ended. Between the two, backward only waits."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()  # buckets become ready on autograd's thread and end on gloo's
        self._ready_s = self._done_s = 0.0

    def hook(self, state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations, and ours are text
        self._ready_s = time.perf_counter()
        buffer = bucket.buffer().div_(self._world_size)
        future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(self._done)

    def _done(self, future: torch.futures.Future) -> torch.Tensor:
        with self._lock:
            self._done_s = max(self._done_s, time.perf_counter())
        return future.value()[0]

    def take_ms(self) -> float:
        with self._lock:
            exposed_ms = max(self._done_s - self._ready_s, 0.0) * 1e3
            self._ready_s = self._done_s = 0.0
        return exposed_ms
