"""Names of this machine and host that processes can compare. docs/reference/training.md, "Ranks", defines both."""

from __future__ import annotations

import os
import platform
from pathlib import Path

PROC = Path("/proc")
HOST_VARIABLE = "ZEROBENCH_HOST"
"""Environment variable: ranks with different texts in it behave as ranks of different hosts."""


def boot_id(proc: Path = PROC) -> str:
    """Return a text that the kernel chose when it booted, or an empty one where it cannot be read."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def machine_identity(proc: Path = PROC, *, has_quota: bool) -> str:
    """Return a text that two processes share exactly if they divide the same cores.

    ``has_quota``: control groups limit this process's CPU time. Another container then has a limit of its own.
    """
    kernel = boot_id(proc) or platform.node()
    return f"{kernel} {_namespace(proc, 'pid')}" if has_quota else kernel


def host_identity(proc: Path = PROC, *, name: str = "") -> str:
    """Return a text that two processes share exactly if they can connect by shared memory.

    They need one kernel, the network namespace of the abstract socket by which they meet, and the process namespace in
    which each watches the other. ``name`` is what ZEROBENCH_HOST adds to pretend several hosts.
    """
    namespaces = (_namespace(proc, kind) for kind in ("net", "pid"))
    return " ".join((boot_id(proc) or platform.node(), *namespaces, *filter(None, [name])))


def _namespace(proc: Path, kind: str) -> str:
    try:
        return os.readlink(proc / f"self/ns/{kind}")
    except OSError:
        return kind
