"""Whether ranks can meet, told at once: torch tries for its whole timeout, and then names no cure."""

from __future__ import annotations

import errno
import os
import resource
import socket
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
            f"{world_size} ranks take {needed_num} files or more to meet, and this one may open {free_num}: raise the "
            "limit (`ulimit -n`)"
        )


def expect_route(address: str, *, source: str = "MASTER_ADDR") -> None:
    """CommunicationError where no interface leads to ``address``, which ``source`` names. What else is wrong is left to
    torch."""
    no_way = ""
    for place in _places(address):
        try:
            with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
                probe.connect(place[4])  # of a datagram socket: looks for the way and sends nothing
            return
        except OSError as error:
            if error.errno not in _NO_WAY:
                return
            no_way = str(error.strerror)
    if no_way:
        raise CommunicationError(
            f"ranks cannot meet at {address} ({source}): {no_way}; bring up the interface that leads there "
            "(`ip link set lo up` for 127.0.0.1)"
        )


def _places(address: str) -> list[Any]:
    try:
        return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
