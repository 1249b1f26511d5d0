"""Loads the C++ core and the CUDA module next to the torch that they were built against."""

from __future__ import annotations

import os
from types import ModuleType

from zerobench import errors


def import_torch() -> ModuleType:
    """With OMP_PROC_BIND set, its OpenMP binds the thread that imports it to one core: that thread, and what it starts
    or forks, may run afterwards where it might before."""
    allowed = os.sched_getaffinity(0)
    import torch

    os.sched_setaffinity(0, allowed)
    return torch


def load() -> ModuleType:
    """Import torch and ``zerobench._core``; one clear sentence where the two do not fit."""
    torch = import_torch()
    try:
        from zerobench import _build_info
    except ImportError as error:
        raise errors.Error(
            "zerobench's core is not built here; install the package with `pip install .`"
        ) from error
    installed = ".".join(torch.__version__.split(".")[:2])
    if installed != _build_info.TORCH_MINOR:
        raise errors.Error(
            f"zerobench was built against torch {_build_info.TORCH_MINOR} and torch {torch.__version__} is installed; "
            f"reinstall it with `pip install --force-reinstall --no-deps .` or install torch {_build_info.TORCH_MINOR}"
        )
    from zerobench import _core

    return _core


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
