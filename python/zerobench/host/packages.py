"""Which Python packages are installed, told without importing them. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. It is not: importing DeepSpeed initialises CUDA."""
    return importlib.util.find_spec(package) is not None


def major_version(package: str) -> int:
    """Return the first number of an installed package's version."""
    return int(importlib.metadata.version(package).partition(".")[0])
