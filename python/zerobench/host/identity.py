"""Names of this host that processes can compare."""

from __future__ import annotations

import os
import platform
from pathlib import Path

PROC = Path("/proc")


def boot_id(proc: Path = PROC) -> str:
    """Return a text that the kernel chose when it booted, or an empty one where it cannot be read."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_identity(proc: Path = PROC) -> str:
    """Return a text that two processes share exactly if they can connect by shared memory.

    They need one kernel, the network namespace of the abstract socket by which they meet, and the process namespace in
    which each watches the other.
    """
    namespaces = (_namespace(proc, kind) for kind in ("net", "pid"))
    return " ".join((boot_id(proc) or platform.node(), *namespaces))


def _namespace(proc: Path, kind: str) -> str:
    try:
        return os.readlink(proc / f"self/ns/{kind}")
    except OSError:
        return kind
