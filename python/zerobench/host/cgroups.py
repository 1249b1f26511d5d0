"""Limits of control groups, version 1 and 2, on this process's memory and CPU time. Read as csrc/memory/host_limits.cpp
reads them, for code that runs without the core. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED_BYTES = 1 << 60  # above it, version 1 means none


class HostFiles(NamedTuple):
    """Roots of what the kernel shows, which tests place elsewhere."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


HOST_FILES = HostFiles()


class MemoryLimit(NamedTuple):
    limit_bytes: int
    used_bytes: int  # without cached files that the kernel gives up first

    @property
    def left_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)


def memory_limits(files: HostFiles = HOST_FILES) -> list[MemoryLimit]:
    """Return the limits of the process's own control group and of those above it; empty if there is no limit."""
    folders2, folders1 = _folders(files, version=2), _folders(files, version=1, controller="memory")
    found = [
        *(_memory_limit(folder, "memory.max", "memory.current", "inactive_file") for folder in folders2),
        *(
            _memory_limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for folder in folders1
        ),
    ]
    return [limit for limit in found if limit is not None]


def cpu_quota(files: HostFiles = HOST_FILES) -> float | None:
    """CPU cores' worth of time, the least that the process's own control group and those above it allow; None where
    none sets a limit."""
    found = []
    for folder in _folders(files, version=2):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        found.append((_number(quota), _number(period)))
    for folder in _folders(files, version=1, controller="cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        found.append((_number(quota), _number(period)))
    return min((quota / period for quota, period in found if quota and period), default=None)


def _memory_limit(folder: Path, limit: str, usage: str, reclaimable: str) -> MemoryLimit | None:
    limit_bytes, usage_bytes = _number(_read(folder / limit)), _number(_read(folder / usage))
    if limit_bytes is None or usage_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    fields = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
    return MemoryLimit(limit_bytes, max(usage_bytes - (_number(fields.get(reclaimable, "")) or 0), 0))


def _folders(files: HostFiles, *, version: int, controller: str = "") -> Iterator[Path]:
    """Yield the folders of the process's own control group and of those above it, the mount's last. In a container the
    mount often begins at its own group, and the path that the kernel names does not exist: then only the mount's folder
    has the files."""
    mount = files.cgroup / controller if version == 1 else files.cgroup
    path = PurePosixPath("/")
    for line in _read(files.proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, named = rest.partition(":")  # "0::/path" (version 2) or "4:cpu,cpuacct:/path"
        if controllers == "" if version == 2 else controller in controllers.split(","):
            path = PurePosixPath(named)
    for folder in (path, *path.parents):
        yield mount / str(folder).lstrip("/")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" and -1 are no limits
