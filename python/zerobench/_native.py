"""Loads the C++ core and the CUDA module next to the torch that they were built against."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from zerobench import errors

_NO_TORCH = f"torch is not installed for {sys.executable}: `pip install .` installs it with zerobench"
_REINSTALL = (
    "it was built for another Python or torch; reinstall it with `pip install --force-reinstall --no-deps .`"
)


def import_torch() -> ModuleType:
    """With OMP_PROC_BIND set, its OpenMP binds the thread that imports it to one core: that thread, and what it starts
    or forks, may run afterwards where it might before."""
    allowed = os.sched_getaffinity(0)
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise errors.Error(_NO_TORCH) from error

    os.sched_setaffinity(0, allowed)
    return torch


def load() -> ModuleType:
    """Import torch and ``zerobench._core``; one clear sentence where the two do not fit."""
    _expect_built_for(import_torch().__version__)
    try:
        from zerobench import _core
    except ImportError as error:
        raise errors.Error(f"zerobench's core does not load here ({error}): {_REINSTALL}") from error
    try:
        _core.best_isa()
    except ValueError as error:  # ZEROBENCH_ISA names what this CPU lacks
        raise errors.ConfigError(str(error)) from None
    return _core


def check_installation(*, built_against: str | None = None) -> None:
    """Raise what ``load`` would raise, as far as that can be told without importing torch. ``built_against``: the
    minor of torch that the core was built for; what the build recorded by default."""
    if importlib.util.find_spec("torch") is None:
        raise errors.Error(_NO_TORCH)
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # from a source tree
        version = None
    _expect_built_for(version, built_against=built_against)
    if importlib.util.find_spec("zerobench._core") is None:
        raise errors.Error(
            f"zerobench's core is not here for Python {sys.version_info[0]}.{sys.version_info[1]}: {_REINSTALL}"
        )


def _expect_built_for(installed: str | None, *, built_against: str | None = None) -> None:
    """Expect a built core, for this version of torch (None where it is not known)."""
    try:
        from zerobench import _build_info
    except ImportError as error:
        raise errors.Error(
            "zerobench's core is not built here; install the package with `pip install .`"
        ) from error
    built_against = built_against or _build_info.TORCH_MINOR
    if installed is not None and installed.split(".")[:2] != built_against.split("."):
        raise errors.Error(
            f"zerobench was built against torch {built_against} and torch {installed} is installed; "
            f"reinstall it with `pip install --force-reinstall --no-deps .` or install torch {built_against}"
        )


def load_cuda() -> ModuleType:
    """Import torch and ``zerobench._cuda``; torch first, so that both share its NCCL."""
    load()
    from zerobench import _build_info

    if not _build_info.CUDA_MODULE:
        raise errors.Error(
            f"zerobench was built without its CUDA module ({_build_info.CUDA_REASON}); reinstall it where nvcc is with "
            "`ZEROBENCH_CUDA=on pip install --force-reinstall --no-deps .`"
        )
    try:
        from zerobench import _cuda
    except ImportError as error:
        raise errors.Error(
            f"zerobench's CUDA module does not load here: {error} (built because {_build_info.CUDA_REASON})"
        ) from error
    return _cuda


def expect_kernels_for(
    device: str, name: str, *, major: int, minor: int, built_for: Sequence[str] | None = None
) -> None:
    """Raise Error where the CUDA module has no code for a device of this compute capability. ``built_for``: the
    architectures of its code; what the build recorded by default."""
    if built_for is None:
        from zerobench import _build_info

        built_for = _build_info.CUDA_ARCHITECTURES
    if not any(_runs_on(architecture, major, minor) for architecture in built_for):
        raise errors.Error(
            f"{device} ({name}) is of compute capability {major}.{minor} and zerobench's kernels were built for "
            f"{', '.join(built_for)}; reinstall it with `CUDAARCHS={major}{minor} ZEROBENCH_CUDA=on pip install "
            "--force-reinstall --no-deps .`"
        )


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Return whether code for one of CMake's architectures runs: machine code within its major version, PTX from its
    own version on. Names that are not numbers ("native", "90a") are left to the driver."""
    number, _, kind = architecture.partition("-")
    if not number.isdigit():
        return True
    built_for = divmod(int(number), 10)
    return built_for <= (major, minor) and (kind != "real" or built_for[0] == major)
