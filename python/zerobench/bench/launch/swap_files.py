"""Removal of files that killed ranks left on the disks that they swapped to. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Collection
from pathlib import Path

from zerobench.host.locked_folder import remove_stale

_RING_S = 5.0  # in which the kernel lets go of files that a dead process's ring has


def remove_left(parent: str, *, pids: Collection[int]) -> None:
    """Remove what dead processes of this host left: the files of those in ``pids``, and stale folders of peers from any
    process."""
    host = re.sub("[^A-Za-z0-9_-]", "", socket.gethostname())
    for file in Path(parent).glob(f"zerobench-swap.{host}.*.tmp"):  # named in csrc/io/swap_file.cpp
        if any(f".pid{pid}." in file.name for pid in pids):
            with contextlib.suppress(OSError):
                _remove_file(file)
    remove_stale(Path(parent), "zerobench-swap-")


def _remove_file(file: Path) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    deadline = time.monotonic() + _RING_S
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return file.unlink()
    finally:
        os.close(fd)
