"""How fast one GPU writes into another's memory, measured in a process of its own: the command that asks must not
initialise CUDA, since its ranks are forked from it. Run as a module, this is that process. Imports torch there only."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from zerobench.bench.gpus import child_environment
from zerobench.errors import Error

COPY_BYTES = 1 << 28
COPY_NUM = 8  # a sample
SAMPLE_NUM = 9
_ANSWER_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """Copies from GPU 0 to GPU 1, in one direction."""

    gb_s: list[float]
    is_direct: bool  # without a stop in host memory


def measure_link() -> Link:
    """Ask another process. Raises Error."""
    asked = subprocess.run(
        [sys.executable, "-m", "zerobench.bench.micro.link"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=child_environment(), timeout=_ANSWER_S,
    )  # fmt: skip
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise Error(f"the link between two GPUs could not be measured: {last}")
    return Link(**json.loads(asked.stdout.strip().splitlines()[-1]))


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
