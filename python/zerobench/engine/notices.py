"""Notices of engines: records of the logger "zerobench", each with the rank in front. Imports no torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from zerobench.errors import ConfigError

LEVEL_VARIABLE = "ZEROBENCH_LOG"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_LOGGER = logging.getLogger("zerobench")


class Notices:
    """Gives the notices of one rank. Those that are ``same_on_all_ranks`` are left to rank 0."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def warn(self, text: str, *, same_on_all_ranks: bool = False) -> None:
        """Warn that training is probably not what the script means."""
        self._give(logging.WARNING, text, same_on_all_ranks)

    def info(self, text: str, *, same_on_all_ranks: bool = False) -> None:
        """Tell what was chosen or found."""
        self._give(logging.INFO, text, same_on_all_ranks)

    def _give(self, level: int, text: str, same_on_all_ranks: bool) -> None:
        if not same_on_all_ranks or self._rank == 0:
            _LOGGER.log(level, f"[rank {self._rank}] {text}", stacklevel=3)


def configure(environment: Mapping[str, str]) -> None:
    """Set the level that ZEROBENCH_LOG names, and print notices for applications that do not configure logging.

    Raises ConfigError for a level that does not exist.
    """
    if given := environment.get(LEVEL_VARIABLE):
        if given.lower() not in _LEVELS:
            raise ConfigError(f"{LEVEL_VARIABLE}={given} is not a level: set one of {', '.join(_LEVELS)}")
        _LOGGER.setLevel(_LEVELS[given.lower()])
    if _PRINTER not in _LOGGER.handlers:
        _LOGGER.addHandler(_PRINTER)


class _Printer(logging.Handler):
    """Prints to stderr as long as the application has no handler of its own, which it may still add later."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or _has_other_handlers():
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # such as a closed pipe, which must not end the training
            self.handleError(record)


_PRINTER = _Printer()
_PRINTER.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))


def _has_other_handlers() -> bool:
    logger: logging.Logger | None = _LOGGER
    while logger is not None:
        if any(handler is not _PRINTER for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
