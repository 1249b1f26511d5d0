"""Consoles that show texts as they are: what looks like rich's markup or emoji codes is part of a path or a name."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console


def plain_console(*, stderr: bool = False) -> Console:
    """With ``stderr`` for notes, which end no command where nobody takes them any more."""
    file: Any = _BestEffort(sys.stderr) if stderr and sys.stderr is not None else None
    return _Console(stderr=stderr, file=file, markup=False, emoji=False)


def print_document(verdict: str, content: Mapping[str, Any]) -> None:
    """Print one JSON document whose first key is the verdict. Numbers that JSON lacks, such as NaN, become null."""
    print(json.dumps(_as_json({"verdict": verdict, **content}), indent=1, allow_nan=False))


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def forget_unknown_size() -> None:
    """COLUMNS=0 is that of a terminal that does not know its size; rich would show nothing at all."""
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name, "").strip("0") == "":
            os.environ.pop(name, None)


def drop_stdout() -> None:
    """Discard what is still to be printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`| head` has seen enough, which changes no exit code."""
        drop_stdout()


class _BestEffort:
    """A text stream whose failures are nobody's concern."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
