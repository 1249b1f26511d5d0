"""How fast one GPU writes into another's memory, measured in a process of its own: the command that asks must not
initialise CUDA, since its ranks are forked from it. Run as a module, this is that process. Imports torch there only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from zerobench.micro.asking import ask

COPY_BYTES = 1 << 28
COPY_NUM = 8  # a sample
SAMPLE_NUM = 9
_ANSWER_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """Copies from GPU 0 to GPU 1, in one direction."""

    gb_s: list[float]
    is_direct: bool  # without a stop in host memory


def measure_link(*, answer_s: float = _ANSWER_S) -> Link:
    """Ask another process. Raises Error, also where it takes longer than ``answer_s``."""
    failure = "the link between two GPUs could not be measured"
    return Link(**json.loads(ask("zerobench.micro.link", failure=failure, answer_s=answer_s)))


def _measure() -> Link:
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    destination = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:1")
    samples = []
    for _ in range(SAMPLE_NUM + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(COPY_NUM):
            destination.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        samples.append(COPY_NUM * COPY_BYTES / begin.elapsed_time(end) / 1e6)
    return Link(gb_s=samples[1:], is_direct=torch.cuda.can_device_access_peer(1, 0))


if __name__ == "__main__":
    print(json.dumps(asdict(_measure())))
