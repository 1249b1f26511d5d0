"""Loads the C++ core next to the torch it was built against."""

from __future__ import annotations

from types import ModuleType

from zerobench import errors


def load() -> ModuleType:
    """Import torch and ``zerobench._core``; one clear sentence where the two do not fit."""
    import torch

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
