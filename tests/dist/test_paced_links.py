"""Links that are made slower: by waits in the communicators, and by queues between network namespaces."""

from __future__ import annotations

import time

import pretended_hosts
import pytest
import ranks
import torch.distributed as dist

import zerobench
from zerobench import _native
from zerobench.host.network import parse_network

NETWORK = "1gbit"
MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB)
COLLECTIVES = ("all_gather", "reduce_scatter")
REPEATS = 25  # the shortest counts: other processes make ranks wait for cores


def times_of_collectives(rank, hosts, network):
    """Return the shortest time of each collective and size, in seconds. ``network``: paces, None does not."""
    pretended_hosts.become_host(rank, hosts)
    pretended_hosts.join(rank)
    core = _native.load()
    comm = core.make_c10d_communicator(dist.new_group(backend="gloo").group_name)
    if network is not None:
        link = parse_network(network, source="test")
        paced = core.PacedLink(bytes_per_s=link.data_bytes_per_s, latency_s=link.latency_s)
        comm = core.make_paced_communicator(comm, link=paced)
    found = {}
    for size in SIZES:
        shard_bytes = size // rank.world_size
        whole, part = comm.allocate(size, shared=True), comm.allocate(shard_bytes, shared=True)
        for collective in COLLECTIVES:
            pair = (part, whole) if collective == "all_gather" else (whole, part)
            found[collective, size] = min(
                timed(comm, collective, *pair, numel=shard_bytes // 4) for _ in range(REPEATS)
            )
    comm.close()
    dist.destroy_process_group()
    return found


def timed(comm, collective, source, destination, *, numel):
    comm.barrier()
    began = time.perf_counter()
    comm.repeat(collective, 1, source=source, destination=destination, numel=numel)
    return time.perf_counter() - began


def slowest(by_rank):
    return {case: max(found[case] for found in by_rank) for case in by_rank[0]}


@pytest.fixture(scope="module")
def paced():
    return slowest(ranks.run(times_of_collectives, pretended_hosts.on_loopback(), NETWORK))


def test_paced_collectives_take_what_the_link_needs(paced):
    speed = parse_network(NETWORK, source="test").data_bytes_per_s
    for size in SIZES:
        assert paced["all_gather", size] >= size / 2 / speed
        assert paced["reduce_scatter", size] >= size / speed  # gloo reduces everything on all ranks


@pytest.mark.long  # its times need a machine on which nothing else runs
def test_pacing_and_shaping_agree(paced):
    with pretended_hosts.make_network(2, NETWORK) as network:
        shaped = slowest(ranks.run(times_of_collectives, pretended_hosts.in_namespaces(network), None))
    ratios = {case: paced[case] / shaped[case] for case in paced}
    assert all(ratio == pytest.approx(1, abs=0.1) for ratio in ratios.values()), ratios


def paced_without_hosts(rank):
    """Return what an engine says to a network among ranks of one host."""
    import os

    os.environ["ZEROBENCH_NETWORK"] = NETWORK
    with pytest.raises(zerobench.errors.ConfigError) as raised:
        zerobench.initialize(model(), config=rank.config(stage=0))
    return str(raised.value)


def model():
    import torch

    return torch.nn.Linear(8, 8)


def test_ranks_of_one_host_have_no_links_to_pace():
    for message in ranks.run(paced_without_hosts):
        assert "2 ranks are on this host: set ZEROBENCH_HOST to another text on each rank" in message


def steps_over_a_slow_link(rank, hosts):
    """Return the time of a step and the bytes that it sends, with an engine of stage 0 on a paced link."""
    import os

    import torch

    own = pretended_hosts.become_host(rank, hosts)
    os.environ["ZEROBENCH_NETWORK"] = "100mbit:1ms"
    engine = zerobench.initialize(torch.nn.Linear(512, 1024), config=rank.config(stage=0, **own))
    times = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        engine.backward(engine(torch.ones(1, 512)).square().mean())
        engine.step()
        times.append(time.perf_counter() - began)
    kind = engine.communicator
    engine.close()
    return kind, min(times)


def test_an_engine_trains_at_the_speed_of_its_link():
    sent_bytes = 513 * 1024 * 4  # an all-reduce of two ranks sends the gradient once
    least_s = sent_bytes / parse_network("100mbit", source="test").data_bytes_per_s
    for kind, step_s in ranks.run(steps_over_a_slow_link, pretended_hosts.on_loopback()):
        assert kind == "c10d"
        assert step_s >= least_s
