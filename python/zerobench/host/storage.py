"""Facts about the places that state can be swapped to: devices, io_uring, GPUDirect Storage. Imports no torch."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

from zerobench.errors import ConfigError

NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
_CAP_IPC_LOCK = 1 << 14
_IO_URING_SETUP = 425  # the system call's number on every architecture
_IO_URING_PARAMS_BYTES = 120  # struct io_uring_params
_IO_URING_FEATURES = slice(20, 24)  # its field features
_IO_URING_NEEDED = 0b11  # IORING_FEAT_SINGLE_MMAP and IORING_FEAT_NODROP


def storage_facts() -> dict[str, Any]:
    """Return the storage facts of `info`: whether the swap engines and GPUDirect Storage are available, and if not,
    why."""
    gpu_direct_storage = gpu_direct_storage_text(nvidia_fs=NVIDIA_FS, has_library=has_cufile())
    return {"io_uring": io_uring_text(), "gpu_direct_storage": gpu_direct_storage}


def io_uring_text() -> str:
    """Return what the core returns (csrc/io/ring.cpp), without loading it, since that takes torch: asks for a small
    ring."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    descriptor = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if descriptor < 0:
        return f"not available: io_uring_setup failed with {os.strerror(ctypes.get_errno())}"
    os.close(descriptor)
    features = int.from_bytes(parameters.raw[_IO_URING_FEATURES], sys.byteorder)
    if features & _IO_URING_NEEDED != _IO_URING_NEEDED:
        return "not available: the kernel is older than 5.5"
    return "usable"


def gpu_direct_storage_text(*, nvidia_fs: Path, has_library: bool) -> str:
    """Return whether its driver, which makes the file ``nvidia_fs``, and its library are here, and why they make no
    difference."""
    missing = []
    if not nvidia_fs.exists():
        missing.append("the nvidia-fs driver is not loaded")
    if not has_library:
        missing.append("the cuFile library is not installed")
    found = f"not available: {' and '.join(missing)}" if missing else "driver and library present"
    return f"{found}; not used: state swaps through host memory, where the CPU updates it"


def has_cufile() -> bool:
    if ctypes.util.find_library("cufile") is not None:
        return True
    return any(next(Path(folder).glob("nvidia/*/lib/libcufile.so*"), None) for folder in sys.path if folder)


def check_directories(paths: list[Path]) -> None:
    """One clear line before anything is measured."""
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory: give one on the disk to measure")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{path} is not writable: give a directory that is")


def lockable_bytes() -> float:
    """Return the bytes that RLIMIT_MEMLOCK leaves this process, as the core counts them
    (csrc/memory/host_limits.cpp)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if int(lines["CapEff"], 16) & _CAP_IPC_LOCK or limit == resource.RLIM_INFINITY:
        return math.inf
    return max(0, limit - int(lines["VmLck"].split()[0]) * 1024)


def disk_of(path: str | Path) -> int:
    """Return the device number of the file system that holds ``path``."""
    return os.stat(path).st_dev


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def device_facts(path: Path) -> dict[str, Any]:
    """The file system that holds a path, and the block device beneath it as far as the kernel tells."""
    facts: dict[str, Any] = {"path": str(path), "file_system": file_system(path)}
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if not folder.is_dir():
        return facts
    disk = folder if (folder / "queue").is_dir() else folder.parent
    facts["device"] = disk.name
    facts["model"] = _text(disk / "device/model")
    facts["write_cache"] = _text(disk / "queue/write_cache")
    facts["rotational"] = _text(disk / "queue/rotational") == "1"
    return facts


def device_line(facts: dict[str, Any]) -> str:
    if "device" not in facts:
        return f"{facts['path']}: {facts['file_system']}"
    model = f" ({facts['model']})" if facts["model"] else ""
    return (
        f"{facts['path']}: {facts['file_system']} on {facts['device']}{model}, {facts['write_cache']} cache"
    )


def file_system(path: Path) -> str:
    """Its type: that of the longest mount point above the path."""
    best, found = "", "unknown"
    real = str(path.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, kind
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
