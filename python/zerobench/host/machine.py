"""Facts about the machine and the installation, for `info` and for result files. Imports no torch."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from zerobench.host.cgroups import HOST_FILES, HostFiles, MemoryLimit, cpu_quota, memory_limits
from zerobench.host.cpu_use import CpuUse
from zerobench.host.gpus import Gpu
from zerobench.host.numa import ranges_text
from zerobench.host.nvml import Nvml

ENVIRONMENT_NAMES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME", "KMP_AFFINITY", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "NCCL_ALGO",
    "NCCL_CTA_POLICY", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_COMPILE_DISABLE",
    "TORCHINDUCTOR_CUDAGRAPHS", "TORCHINDUCTOR_MAX_AUTOTUNE",
)  # fmt: skip
"""Nothing else of the environment is read into a result file: it may hold secrets."""

_ISA_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16",
              "avx512_fp16", "amx_bf16", "asimd", "asimdhp", "bf16", "sve")  # fmt: skip
_PACKAGES = ("torch", "numpy", "pydantic")
_GPU_PACKAGES = ("triton", "transformers", "deepspeed", "megatron-fsdp", "flash-attn")
BUSY_SHARE = 0.1  # of the cores' time
BUSY_LOOK_S = 0.5


def cpus_usable() -> int:
    """CPU cores that this process may use: its affinity and the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def memory_total_bytes(files: HostFiles = HOST_FILES) -> int:
    total = _meminfo_bytes("MemTotal", files)
    limit = _smallest_limit(files)
    return total if limit is None else min(total, limit.limit_bytes)


def memory_available_bytes(files: HostFiles = HOST_FILES) -> int:
    """Return the bytes that new processes can take without swapping."""
    left = [limit.left_bytes for limit in memory_limits(files)]
    return min([_meminfo_bytes("MemAvailable", files), *left])


def memory_used_bytes(files: HostFiles = HOST_FILES) -> int:
    """Return the bytes used by this container if it has a limit of its own, otherwise by the host; without cached
    files."""
    limit = _smallest_limit(files)
    if limit is not None:
        return limit.used_bytes
    return _meminfo_bytes("MemTotal", files) - _meminfo_bytes("MemAvailable", files)


def _smallest_limit(files: HostFiles) -> MemoryLimit | None:
    return min(memory_limits(files), key=lambda limit: limit.limit_bytes, default=None)


def busy_warning() -> str | None:
    """A sentence when other work runs: timings will suffer. Call it while this process has none of its own."""
    use, before = CpuUse(os.getpid()), time.monotonic()
    time.sleep(BUSY_LOOK_S)
    found, passed_s = use.read(), time.monotonic() - before
    if found.others_s <= BUSY_SHARE * found.cpu_num * passed_s:
        return None
    return (
        f"the machine is busy (other processes use {found.others_s / passed_s:.1f} of {found.cpu_num} cores): "
        "timings will vary; stop other work or add --repeats"
    )


def machine_facts(gpus: Sequence[Gpu] = ()) -> dict[str, Any]:
    """Return the facts that the figures depend on. Scalars are the headline, nested facts stay in the file. ``gpus``:
    those in use."""
    model, flags = _cpu_model_and_flags()
    limit = _smallest_limit(HOST_FILES)
    facts: dict[str, Any] = {
        "cpu": model,
        "cores": cpus_usable(),
        "memory_bytes": memory_total_bytes(),
    }
    if gpus:
        facts |= _gpu_facts(gpus)
    facts["details"] = {
        "host": platform.node(),
        "architecture": platform.machine(),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "cpus_of_host": os.cpu_count(),
        "affinity": ranges_text(sorted(os.sched_getaffinity(0))),
        "cpu_quota": cpu_quota(),
        "numa_nodes": _numa_nodes(),
        "memory_available_bytes": memory_available_bytes(),
        "cgroup_memory_limit_bytes": limit.limit_bytes if limit is not None else None,
        "kernel": platform.release(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "environment": {name: os.environ[name] for name in ENVIRONMENT_NAMES if name in os.environ},
        "build": build_facts(),
    }
    return facts


def gpu_module_facts(built: Mapping[str, Any], *, has_driver: bool) -> dict[str, Any]:
    """Return whether the CUDA module was built and why, and whether it loads here. ``built``: as ``build_facts``."""
    facts: dict[str, Any] = {
        "built": built.get("cuda_module"),
        "reason": built.get("cuda_reason"),
        "loads": False,
    }
    if facts["built"] is False and not has_driver:
        facts["reason"] = f"not needed without an NVIDIA driver; where there is one: {facts['reason']}"
    if facts["built"]:
        try:
            importlib.import_module("zerobench._cuda")
            facts["loads"] = True
        except ImportError as error:
            facts["problem"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return facts


def typed_command() -> list[str]:
    """Return the words of the command that runs, as anybody can type them."""
    return ["python", "-m", "zerobench", *sys.argv[1:]]


def version_facts(*, gpus: bool = False) -> dict[str, str]:
    """Versions by package name, zerobench first; a package that is not there is left out."""
    versions = {"zerobench": _version("zerobench") or build_facts().get("version", "not installed")}
    versions["python"] = platform.python_version()
    for name in (*_PACKAGES, *(_GPU_PACKAGES if gpus else ())):
        version = _version(name)
        if version is not None:
            versions[name] = version
    return versions


def build_facts() -> dict[str, Any]:
    """Return the facts of the compiled core's build; empty before it is built."""
    try:
        from zerobench import _build_info
    except ImportError:
        return {}
    return {name.lower(): value for name, value in vars(_build_info).items() if name.isupper()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu_facts(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """As torch numbers them, with what the driver says about each."""
    nvml = Nvml()
    try:
        facts: dict[str, Any] = {
            "gpus": [{**gpu.model_dump(mode="json"), **nvml.facts(gpu.uuid)} for gpu in gpus],
            **nvml.driver_facts(),
        }
    finally:
        nvml.close()
    if nvml.problem is not None:
        facts["nvml"] = f"no driver facts: {nvml.problem}"
    return facts


def _cpu_model_and_flags() -> tuple[str, set[str]]:
    model, flags = platform.processor() or platform.machine(), set()
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return model, flags


def _numa_nodes() -> dict[str, str]:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {node.name: _read(node / "cpulist") for node in nodes}


def _meminfo_bytes(key: str, files: HostFiles) -> int:
    for line in _read(files.proc / "meminfo").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {key} line on {sys.platform}")


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
