"""Functions that our processes share: end with their parent, have names, read their memory and write JSON lines.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(signum: int) -> None:
    """Linux sends ``signum`` to this process when its parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def name_process(name: str) -> None:
    """Set the name by which ps and top list this process, up to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def vm_data_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData line")


def write_line(fd: int, message: Mapping[str, Any]) -> None:
    """All of it, also where a pipe takes it piece by piece."""
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(fd, view) :]


def child_environment() -> dict[str, str]:
    """For a Python that imports what this one does, and no file of the working folder in its place."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
