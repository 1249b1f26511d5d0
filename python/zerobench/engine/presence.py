"""A socket on each rank that answers while the rank lives, so that an error can name the rank that does not."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from zerobench.host.identity import HOST_VARIABLE


def make_peer_hosts(core: Any, group: Any, environment: Mapping[str, str]) -> Any:
    """Listen, tell the ranks of ``group`` where, and return the core's record of all ranks. Collective."""
    import torch.distributed as dist

    listener, address = _listen(), _own_address(environment)
    name = environment.get(HOST_VARIABLE) or socket.gethostname()
    port = 0 if listener is None else listener.getsockname()[1]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (name, address, port), group=group)
    is_known = all(address and port for _, address, port in everyone)
    return core.PeerHosts(
        everyone if is_known else [], own=group.rank(), listener=-1 if listener is None else listener.detach()
    )


def _listen() -> socket.socket | None:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    with contextlib.suppress(OSError):
        return socket.create_server(("", 0), backlog=4096)
    return None


def _own_address(environment: Mapping[str, str]) -> str | None:
    """Return the address from which this rank reaches MASTER_ADDR, None where that is not known.

    A host's own name often resolves to an address of the loopback interface. The others then know it by that name.
    """
    name = environment.get("MASTER_ADDR")
    if not name:
        return None
    with contextlib.suppress(OSError, ValueError):
        family, _, _, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect(place)
            address = str(datagrams.getsockname()[0])
        return name if ipaddress.ip_address(address).is_loopback else address
    return None
