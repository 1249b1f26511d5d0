"""Exception types of zerobench.

Every error that a user can cause ends in one of these, with one sentence that says what was expected, what came and
what to do. The C++ core's exceptions arrive as the same types, those of files as an OSError with errno and path, and
wrong arguments as a ValueError (csrc/bindings/translate.h).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Error(Exception):
    """Base of all zerobench errors."""


class ConfigError(Error, ValueError):
    """A configuration, option or name is unknown or impossible."""


class StateError(Error):
    """A call came at a moment when it is not legal, or after a failure that needs a reload."""


class CommunicationError(Error):
    """A rank died, stalled past the timeout, or called another collective. ``rank`` is the rank at fault or -1."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class OutOfMemoryError(Error, MemoryError):
    """Memory of a tier ran out; the message says how much was asked for."""


class NonFiniteGradientError(Error, ArithmeticError):
    """A gradient held NaN or Inf, and no lower loss scale is left to retry with."""


class DataError(Error, ValueError):
    """A file or folder of data or results cannot serve: missing, empty, too short, or of another kind."""


class VerificationError(Error):
    """A strategy cannot be held against the reference: other parameters, or steps that are not finite."""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``"did you mean 'x'? "`` for the known name that is most like ``name``, or "" if none is like it.

    ``cutoff`` is the least similarity, from 0 to 1. Names with long common parts, as models have, need less.
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""
