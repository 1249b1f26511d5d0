"""Messages between the command, the fork server and its ranks, one JSON text each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerobench.host.processes import write_line

MESSAGE_LIMIT_BYTES = 1 << 17
FD_LIMIT = 250  # of one SCM_RIGHTS message


TRAIN, END = b"t", b"e"  # orders to a rank that takes turns, a byte each


def send(report_fd: int, kind: str, body: Mapping[str, Any]) -> None:
    """One message of a rank to the command, as ranks.py reads it."""
    write_line(report_fd, {"kind": kind, "body": body})
