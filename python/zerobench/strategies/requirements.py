"""Requirements of peers that are not part of torch, checked before a row of theirs can run. Does not import them."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import re
import time
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from zerobench.host.packages import is_installed

# The same as the extras in pyproject.toml (a test compares them): the versions whose internals the readers know.
DEEPSPEED = "deepspeed>=0.19.8,<0.20"
MEGATRON_FSDP = "megatron-fsdp>=0.6.1,<0.7"
ABANDONED_BUILD_S = 900.0  # no operator takes so long to compile


def _has_library(name: str) -> bool:
    return ctypes.util.find_library(name) is not None


def _has_nvcc() -> bool:
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None


def _has_ninja() -> bool:
    from torch.utils.cpp_extension import is_ninja_available

    return is_ninja_available()


def _build_folder(operator: str) -> str:
    from torch.utils.cpp_extension import _get_build_directory

    return _get_build_directory(operator, verbose=False)


class Tools(NamedTuple):
    """Tools of a host that peers need beside torch."""

    is_installed: Callable[[str], bool] = is_installed  # a package
    has_library: Callable[[str], bool] = _has_library  # of C
    has_nvcc: Callable[[], bool] = _has_nvcc
    has_ninja: Callable[[], bool] = _has_ninja
    build_folder: Callable[[str], str] = _build_folder  # of an operator, by its builder's NAME


HOST_TOOLS = Tools()


def missing_package(module: str, requirement: str, *, tools: Tools = HOST_TOOLS) -> str | None:
    """Return why a row is skipped where ``module`` is not installed, with the command that installs it."""
    if tools.is_installed(module):
        return None
    return f"{module} is not installed: pip install '{requirement}'"


def missing_library(name: str, what: str, *, install: str, tools: Tools) -> str | None:
    """Return why a row is skipped where the linker finds no C library of that name, such as "aio"."""
    if tools.has_library(name):
        return None
    return f"{what} needs lib{name}, which is not installed: install {install}"


def missing_compiler(what: str, *, tools: Tools) -> str | None:
    """Return why an operator that DeepSpeed compiles at its first use cannot be compiled."""
    if not tools.has_nvcc():
        return f"{what} is compiled at its first use and there is no nvcc: install a CUDA toolkit and set CUDA_HOME"
    if not tools.has_ninja():
        return f"{what} is compiled at its first use and there is no ninja: pip install ninja"
    return None


def abandoned_build(what: str, operator: str, *, tools: Tools = HOST_TOOLS) -> str | None:
    """Return why an operator would wait for a build that was killed: torch waits without end for the lock of an
    operator that another process compiles, and a killed build leaves its lock. ``operator`` is its builder's NAME."""
    with contextlib.suppress(OSError):  # no lock, or no folder to compile in, which the build says itself
        lock = os.path.join(tools.build_folder(operator), "lock")
        if time.time() - os.stat(lock).st_mtime > ABANDONED_BUILD_S:
            return f"{what} is compiled at its first use, and a build that was killed has left its lock: delete {lock}"
    return None


def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of this process's GPU, or None where it has none."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def make_architectures_readable(
    environ: MutableMapping[str, str], *, capability: tuple[int, int] | None
) -> None:
    """Write TORCH_CUDA_ARCH_LIST as DeepSpeed's builders can read it: 0.19 takes every entry for two numbers and fails
    at torch's own "10.0a" or "Hopper". In their place comes ``capability``, that of this process's GPU, the only one
    that it builds for."""
    listed = environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if capability and not all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in listed):
        environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*capability)
