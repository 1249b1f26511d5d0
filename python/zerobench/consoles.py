"""Consoles that show texts as they are: what looks like rich's markup or emoji codes is part of a path or a name."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    return Console(stderr=stderr, width=width, markup=False, emoji=False)
