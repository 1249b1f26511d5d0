"""Import the object at ``package.module:name`` that a user named. Imports no torch."""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from zerobench.errors import ConfigError


def is_place(name: str) -> bool:
    """Return whether ``name`` has the form ``package.module:name``."""
    module_name, colon, inner = name.partition(":")
    return bool(colon) and inner.isidentifier() and all(p.isidentifier() for p in module_name.split("."))


def load(place: str, *, what: str) -> Any:
    """Return what lies at ``place``, or None where its module has no such name. ``what`` names it in errors. Raises
    ConfigError where the module cannot be imported."""
    module_name, _, inner = place.partition(":")
    try:
        return getattr(importlib.import_module(module_name), inner, None)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: no module named {error.name!r}: install it or set PYTHONPATH to its folder"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {module_name} cannot be imported: {told(error)}: fix that") from error


def told(error: BaseException) -> str:
    """Return the error in a line, with the place that it comes from."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return text  # which names file and line
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text
