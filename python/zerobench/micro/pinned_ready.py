"""How long it takes until host memory is ready for transfers, in a fresh process: nothing of another measurement is
there. Run as a module, this is that process. Imports torch there only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from zerobench.micro.asking import ask

OURS, TORCH, TOUCH = "zerobench", "torch", "one thread"
_ANSWER_S = 600.0


class Order(BaseModel):
    """Measurement that a process is to make."""

    model_config = ConfigDict(frozen=True)

    side: str
    size_bytes: int
    gpu: int | None  # None: no GPU, and nothing is registered
    threads: int


class Ready(BaseModel):
    """Result of a process's measurement."""

    model_config = ConfigDict(frozen=True)

    seconds: float
    mapped_bytes: int | None = None  # of ours
    huge_bytes: int | None = None
    fill_s: float | None = None
    register_s: float | None = None


def measure_ready(order: Order, *, answer_s: float = _ANSWER_S) -> Ready:
    """Ask another process. Raises Error, also where it takes longer than ``answer_s``."""
    failure = f"{order.side} could not make {order.size_bytes} bytes of host memory ready"
    answer = ask("zerobench.micro.pinned_ready", order.model_dump_json(), failure=failure, answer_s=answer_s)
    return Ready.model_validate_json(answer)


def _measure(order: Order) -> Ready:
    from zerobench import _native

    core = _native.load()
    import torch

    parts = None
    if order.gpu is not None:
        torch.cuda.set_device(order.gpu)
        torch.empty(1, device="cuda")  # the context is there before the clock starts
        device = _native.load_cuda().make_device(order.gpu, on_out_of_memory=torch.cuda.empty_cache)
        parts = device.parts()
    if order.side == OURS:
        cpus = core.allowed_cpus()
        node = core.numa_node_of_cpus(cpus)

        def make() -> object:
            return core.PinnedPool(
                order.size_bytes, thread_num=order.threads, cpus=cpus, numa_node=node, parts=parts
            )
    elif order.side == TORCH:

        def make() -> object:
            return torch.empty(order.size_bytes, dtype=torch.uint8, pin_memory=True)
    else:
        torch.set_num_threads(1)

        def make() -> object:
            return torch.empty(order.size_bytes, dtype=torch.uint8).zero_()

    seconds, made = _timed(make)
    if order.side != OURS:
        return Ready(seconds=seconds)
    stats = made.stats()  # type: ignore[attr-defined]
    return Ready(
        seconds=seconds,
        mapped_bytes=stats.mapped_bytes,
        huge_bytes=stats.huge_bytes,
        fill_s=stats.fill_ms / 1e3,
        register_s=stats.register_ms / 1e3,
    )


def _timed(make: Callable[[], object]) -> tuple[float, object]:
    begin = time.perf_counter()
    made = make()
    return time.perf_counter() - begin, made


if __name__ == "__main__":
    print(json.dumps(_measure(Order.model_validate_json(sys.argv[1])).model_dump(mode="json")))
