"""Whether ranks can meet at an address, told at once: torch tries for its whole timeout, and then names no cure."""

from __future__ import annotations

import errno
import socket

from zerobench.errors import CommunicationError

_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)


def expect_route(address: str) -> None:
    """CommunicationError where no interface leads to ``address`` (MASTER_ADDR). What else is wrong is left to torch."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # of a datagram socket: looks for the way and sends nothing
    except OSError as error:
        if error.errno in _NO_WAY:
            raise CommunicationError(
                f"ranks cannot meet at {address} (MASTER_ADDR): {error.strerror}; bring up the interface that leads "
                "there (`ip link set lo up` for 127.0.0.1)"
            ) from None
