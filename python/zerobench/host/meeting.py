"""Checks that ranks can reach each other, with an answer at once: torch tries for its whole timeout, and then names no
remedy."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterable
from typing import Any

from zerobench.errors import CommunicationError

_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)


def expect_to_meet(world_size: int, *, address: str) -> None:
    """CommunicationError where this rank cannot reach others, by way of ``address`` (MASTER_ADDR)."""
    expect_route(address)
    _expect_descriptors(world_size)


def _expect_descriptors(world_size: int) -> None:
    """CommunicationError where this process could not connect to them all, which would leave them waiting."""
    free_num = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    needed_num = 12 + world_size  # torch 2.13 takes 13 on every rank, and 2 a rank where the store is
    if free_num < needed_num:
        raise CommunicationError(
            f"{world_size} ranks need {needed_num} open files or more to connect, and this process may open "
            f"{free_num}: raise the limit (`ulimit -n`)"
        )


def expect_route(address: str, *, source: str = "MASTER_ADDR") -> None:
    """CommunicationError where no interface leads to ``address``, which ``source`` names. What else is wrong is left to
    torch."""
    expect_reached(map(probe, _places(address)), address, source=source)


def expect_reached(outcomes: Iterable[OSError | None], address: str, *, source: str = "MASTER_ADDR") -> None:
    """Raise CommunicationError if there is no way to any of an address's places, by the outcomes of ``probe``."""
    no_way = ""
    for error in outcomes:
        if error is None or error.errno not in _NO_WAY:
            return
        no_way = str(error.strerror)
    if no_way:
        raise CommunicationError(
            f"ranks cannot connect at {address} ({source}): {no_way}; bring up the interface that leads there "
            "(`ip link set lo up` for 127.0.0.1)"
        )


def probe(place: Any) -> OSError | None:
    """Return why the kernel has no way to a place of ``getaddrinfo``, or None where it has one. Sends nothing."""
    try:
        with socket.socket(place[0], socket.SOCK_DGRAM) as datagrams:
            datagrams.connect(place[4])
    except OSError as error:
        return error
    return None


def _places(address: str) -> list[Any]:
    try:
        return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
