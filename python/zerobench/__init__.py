"""zerobench: a ZeRO training engine that measures itself against everything a user could pick instead.

``zerobench.initialize(model=..., config=...)`` trains; ``python -m zerobench compare`` compares;
``zerobench.report.load(path)`` reads results into pandas. Importing this package loads neither torch nor the core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerobench import errors

if TYPE_CHECKING:
    from zerobench.engine.config import Config
    from zerobench.engine.engine import Engine, initialize
    from zerobench.engine.optimizer import ZeroOptimizer

__version__ = "0.1.0"

_LAZY = {
    "Config": "zerobench.engine.config",
    "Engine": "zerobench.engine.engine",
    "ZeroOptimizer": "zerobench.engine.optimizer",
    "initialize": "zerobench.engine.engine",
}
_MODULES = ("models", "report")  # there without an import of their own

__all__ = ["Config", "Engine", "ZeroOptimizer", "__version__", "errors", "initialize"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"zerobench.{name}")
    raise AttributeError(f"module 'zerobench' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
