"""The notices that engines give, for processes that pytest's caplog does not reach."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Collector(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


@contextlib.contextmanager
def noticed() -> Iterator[list[str]]:
    """Collect the texts of notices that are given in the block."""
    texts: list[str] = []
    collector = _Collector(texts)
    logger = logging.getLogger("zerobench")
    logger.addHandler(collector)
    try:
        yield texts
    finally:
        logger.removeHandler(collector)
