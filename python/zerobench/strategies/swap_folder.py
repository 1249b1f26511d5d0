"""A folder of a peer's swap files that is gone after the run, or after the next one where this one was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "zerobench-swap-"


class SwapFolder:
    """One rank's, under ``parent``. Its owner holds a lock on it while it lives, by which a later run knows."""

    def __init__(self, parent: str) -> None:
        with _locked(parent):  # else another rank could take a folder that is not locked yet for a stale one
            _remove_stale(Path(parent))
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._fd = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        fd = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(BlockingIOError):  # its run lives
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(fd)
