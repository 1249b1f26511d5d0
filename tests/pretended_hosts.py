"""Ranks that are each a host of their own: by name on the loopback interface, or in network namespaces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import ranks

from zerobench.bench.launch.environments import free_ports
from zerobench.host import shaped_network
from zerobench.host.network import parse_network


class Hosts(NamedTuple):
    """Port and namespaces with which ranks become hosts."""

    port: int
    namespaces: Sequence[str]  # files by rank; empty on the loopback interface


def on_loopback() -> Hosts:
    return Hosts(free_ports(1)[0], ())


def in_namespaces(network: shaped_network.ShapedNetwork) -> Hosts:
    return Hosts(29500, [f"/proc/{os.getpid()}/fd/{file}" for file in network.namespaces])


def make_network(num: int, text: str) -> shaped_network.ShapedNetwork:
    """Return hosts with links of this speed; skip the test where the machine cannot make them."""
    link = parse_network(text, source="the test's network")
    assert link is not None
    if why := shaped_network.why_not_shaped(link):
        pytest.skip(f"links cannot be shaped here: {why}")
    return shaped_network.ShapedNetwork(num, link)


def become_host(rank: ranks.Rank, hosts: Hosts) -> dict[str, Any]:
    """Make this process a host, and return what the engine's configuration says of it."""
    interface, address = "lo", "127.0.0.1"
    if hosts.namespaces:
        interface, address = shaped_network.INTERFACE, shaped_network.address_of(0)
        shaped_network.enter_namespace(os.open(hosts.namespaces[rank.rank], os.O_RDONLY))
    os.environ |= {
        "ZEROBENCH_HOST": f"host-{rank.rank}",
        "GLOO_SOCKET_IFNAME": interface,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(hosts.port),
    }
    return {"local_rank": 0, "local_world_size": 1}


def join(rank: ranks.Rank, *, timeout_s: float = 60.0) -> None:
    """Make torch.distributed's default group of the hosts."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", rank=rank.rank, world_size=rank.world_size, timeout=timedelta(seconds=timeout_s)
    )
