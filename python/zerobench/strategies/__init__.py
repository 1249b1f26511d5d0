"""Ways to train: zerobench's own ZeRO stages and every peer, behind one protocol (base.py).

Names come from the catalogue, so that importing this imports neither torch nor a peer. A strategy of one's own is
named by the place of its class, ``package.module:ClassName``.
"""

from __future__ import annotations

from zerobench._native import import_torch
from zerobench.errors import ConfigError
from zerobench.host import imports
from zerobench.strategies.base import Strategy
from zerobench.strategies.catalogue import CATALOGUE, Facts, available, check

__all__ = ["Strategy", "available", "facts", "get"]


def get(name: str) -> type[Strategy]:
    """The class of a built-in strategy or of ``package.module:ClassName``; imports its module, and torch."""
    check(name)
    place = CATALOGUE[name].place if name in CATALOGUE else name
    import_torch()
    found = imports.load(place, what=f"strategy {name!r}")
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        module_name, _, class_name = place.partition(":")
        raise ConfigError(f"strategy {name!r}: {module_name} has no Strategy class named {class_name!r}")
    return found


def facts(name: str) -> Facts:
    """Return a strategy's row in the catalogue, or what a class of one's own declares; only that imports a module."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    declared = get(name).facts
    if not isinstance(declared, Facts):
        raise ConfigError(
            f"strategy {name!r}: facts is a {type(declared).__name__}: make it a zerobench.strategies.catalogue.Facts"
        )
    return declared
