"""Whether ranks can meet at an address, told at once: torch tries for its whole timeout, and then names no cure."""

from __future__ import annotations

import errno
import socket
from typing import Any

from zerobench.errors import CommunicationError

_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)


def expect_route(address: str) -> None:
    """CommunicationError where no interface leads to ``address`` (MASTER_ADDR). What else is wrong is left to torch."""
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
            f"ranks cannot meet at {address} (MASTER_ADDR): {no_way}; bring up the interface that leads there "
            "(`ip link set lo up` for 127.0.0.1)"
        )


def _places(address: str) -> list[Any]:
    try:
        return socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
