"""Real disks that fail one rank alone, without rights where the kernel allows it: small file systems, limits, holes."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_PRIVATE_TREE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
_PUNCH, _KEEP_SIZE = 2, 1
_CAPABILITIES_3 = 0x20080522


def mount_small(folder: str, size_bytes: int) -> str | None:
    """Puts a tmpfs of this size on ``folder`` for this process alone; why not, where the kernel does not let it."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(_NEW_MOUNTS) != 0:  # not root: in a user namespace of its own
        if LIBC.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            return f"this machine gives no mount namespace: {os.strerror(ctypes.get_errno())}"
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    options = f"size={size_bytes}".encode()
    if (
        LIBC.mount(b"none", b"/", None, _PRIVATE_TREE, None) != 0
        or LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options) != 0
    ):
        return f"this machine does not let tests mount: {os.strerror(ctypes.get_errno())}"
    return None


def give_up_capabilities(*numbers: int) -> None:
    """Drop capabilities of root, for this thread and those that it starts later."""
    header = struct.pack("Ii", _CAPABILITIES_3, 0)
    data = ctypes.create_string_buffer(24)
    if LIBC.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("6I", data.raw))
    for number in numbers:
        words[3 * (number // 32)] &= ~(1 << (number % 32))
    if LIBC.capset(header, struct.pack("6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


OVERRIDES = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
IPC_LOCK = 14


def limit(kind: int, amount: int) -> None:
    """The soft limit, so that it may be lifted again."""
    resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


def swap_file(folder: str, rank: int) -> Path:
    (found,) = (path for path in Path(folder).iterdir() if f".rank{rank}." in path.name)
    return found


def take_away(folder: str, rank: int) -> None:
    """Give the space that was reserved for a rank's file to another one, until the disk is full."""
    path = swap_file(folder, rank)
    with path.open("r+b") as file:
        size = ctypes.c_int64(path.stat().st_size)
        if LIBC.fallocate(file.fileno(), _PUNCH | _KEEP_SIZE, ctypes.c_int64(0), size) != 0:
            raise OSError(ctypes.get_errno(), "fallocate")
    fill(folder)


def fill(folder: str) -> None:
    with (Path(folder) / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass


def private_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")
    )
    return int(line.split()[1]) << 10
