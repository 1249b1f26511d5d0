"""What peers that are not part of torch need before a row of theirs can run. Imports none of them."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import os
import re
import time

# The same as the extras in pyproject.toml (a test compares them): the versions whose internals the readers know.
DEEPSPEED = "deepspeed>=0.19.8,<0.20"
MEGATRON_FSDP = "megatron-fsdp>=0.6.1,<0.7"
ABANDONED_BUILD_S = 900.0  # no operator takes so long to compile


def missing_package(module: str, requirement: str) -> str | None:
    """Why a row is skipped where ``module`` is not installed, with the command that installs it."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{module} is not installed: pip install '{requirement}'"


def missing_library(name: str, what: str, *, install: str) -> str | None:
    """A C library that the linker must find, such as "aio"."""
    if ctypes.util.find_library(name) is not None:
        return None
    return f"{what} needs lib{name}, which is not installed: install {install}"


def missing_compiler(what: str) -> str | None:
    """DeepSpeed compiles some operators at their first use."""
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    if CUDA_HOME is None:
        return f"{what} is compiled at its first use and there is no nvcc: install a CUDA toolkit and set CUDA_HOME"
    if not is_ninja_available():
        return f"{what} is compiled at its first use and there is no ninja: pip install ninja"
    return None


def abandoned_build(what: str, operator: str) -> str | None:
    """torch waits without end for the lock of an operator that another process compiles, and a build that was killed
    leaves its lock. ``operator`` is its builder's NAME."""
    from torch.utils.cpp_extension import _get_build_directory

    with contextlib.suppress(OSError):  # no lock, or no folder to compile in, which the build says itself
        lock = os.path.join(_get_build_directory(operator, verbose=False), "lock")
        if time.time() - os.stat(lock).st_mtime > ABANDONED_BUILD_S:
            return f"{what} is compiled at its first use, and a build that was killed has left its lock: delete {lock}"
    return None


def make_architectures_readable() -> None:
    """TORCH_CUDA_ARCH_LIST as DeepSpeed's builders can read it: 0.19 takes every entry for two numbers and fails at
    torch's own "10.0a" or "Hopper". In their place comes the GPU of this process, the only one that it builds for."""
    import torch

    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if torch.cuda.is_available() and not all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in listed):
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
