"""A temporary folder that is gone after the run, or after the next one where this one was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


class LockedFolder:
    """One process's, under ``parent``. Its owner holds a lock on it while it lives, by which a later run knows."""

    def __init__(self, parent: str, *, prefix: str) -> None:
        remove_stale(Path(parent), prefix)
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        fd = os.open(made, os.O_RDONLY)
        with contextlib.suppress(OSError):  # where nothing can be locked, nothing is taken for stale
            fcntl.flock(fd, fcntl.LOCK_EX)
        self.path = str(made.with_name(made.name[1:]))
        os.rename(made, self.path)  # now others may find it, which is locked
        self.close = weakref.finalize(self, _remove, self.path, fd)


def _remove(path: str, fd: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def remove_stale(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is another user's, or has just gone
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its run lives
                shutil.rmtree(folder)
            finally:
                os.close(fd)
