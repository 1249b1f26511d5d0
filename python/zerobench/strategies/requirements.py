"""What peers that are not part of torch need before a row of theirs can run. Imports none of them."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re

# The same as the extras in pyproject.toml (a test compares them): the versions whose internals the readers know.
DEEPSPEED = "deepspeed>=0.19.8,<0.20"
MEGATRON_FSDP = "megatron-fsdp>=0.6.1,<0.7"


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


def make_architectures_readable() -> None:
    """TORCH_CUDA_ARCH_LIST as DeepSpeed's builders can read it: 0.19 takes every entry for two numbers and fails at
    torch's own "10.0a" or "Hopper". In their place comes the GPU of this process, the only one that it builds for."""
    import torch

    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if torch.cuda.is_available() and not all(re.fullmatch(r"\d+\.\d+(\+PTX)?", entry) for entry in listed):
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
