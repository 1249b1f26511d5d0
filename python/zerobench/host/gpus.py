"""Which GPUs torch sees, asked in a process of its own: neither the command nor the fork server may initialise CUDA,
since a child forked after that could not use it. Run as a module, this is that process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from zerobench.host.processes import child_environment

_DRIVER_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
_ANSWER_S = 120.0


class Gpu(BaseModel):
    """A GPU as torch numbers and describes it."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    uuid: str  # without the prefix that NVML puts before it
    total_bytes: int
    compute_capability: tuple[int, int]


class VisibleGpus(BaseModel):
    """GPUs that torch sees, or the reason why it sees no GPU."""

    model_config = ConfigDict(frozen=True)

    gpus: tuple[Gpu, ...] = ()
    reason: str | None = None


def driver_present() -> bool:
    return any(Path(sign).exists() for sign in _DRIVER_SIGNS)


def visible_gpus(
    *, has_driver: Callable[[], bool] = driver_present, python: str = sys.executable
) -> VisibleGpus:
    """Ask another process, run by ``python``; none is started where there is no driver."""
    if not has_driver():
        return VisibleGpus(reason="this machine has no NVIDIA driver")
    try:
        asked = subprocess.run(
            [python, "-m", "zerobench.host.gpus"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, env=child_environment(), timeout=_ANSWER_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return VisibleGpus(reason=f"torch did not say within {_ANSWER_S:g} s which GPUs it sees")
    answer = asked.stdout.strip().splitlines()
    if asked.returncode != 0 or not answer:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        return VisibleGpus(reason=f"torch could not be asked for GPUs: {last}")
    return VisibleGpus.model_validate_json(answer[-1])


def _seen_by_torch() -> VisibleGpus:
    import torch

    if torch.version.cuda is None:
        return VisibleGpus(reason=f"torch {torch.__version__} is a build without CUDA")
    try:
        torch.cuda.init()
    except Exception as error:
        return VisibleGpus(reason=(str(error).strip().splitlines() or [type(error).__name__])[0])
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            Gpu(
                index=index,
                name=properties.name,
                uuid=str(properties.uuid),
                total_bytes=properties.total_memory,
                compute_capability=(properties.major, properties.minor),
            )
        )
    return VisibleGpus(gpus=tuple(gpus), reason=None if gpus else "torch sees no GPU")


if __name__ == "__main__":
    print(json.dumps(_seen_by_torch().model_dump(mode="json")))
