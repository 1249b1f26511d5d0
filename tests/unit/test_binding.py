"""Ranks on their NUMA node's cores, from trees of files as the kernel shows them and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_numa import two_sockets

from zerobench.bench.rank import binding
from zerobench.errors import ConfigError
from zerobench.host import cpu_shares, numa


def test_a_machine_that_does_not_say_what_is_near_is_an_error(tmp_path) -> None:
    sysfs = two_sockets(tmp_path)
    nodes = binding.known_nodes(sysfs)
    assert binding.known_node("00000000:1B:00.0", nodes, sysfs) == 1
    for bus in ("00000000:2C:00.0", "00000000:3D:00.0", None):
        with pytest.raises(ConfigError, match="which node"):
            binding.known_node(bus, nodes, sysfs)
    with pytest.raises(ConfigError, match="lists no NUMA nodes"):
        binding.known_nodes(tmp_path / "nothing")


@pytest.mark.parametrize("rank_num", range(1, 9))
def test_ranks_fill_nodes_evenly_and_share_no_core(tmp_path, rank_num) -> None:
    sysfs = two_sockets(tmp_path)
    nodes = numa.read_nodes(sysfs)
    places = cpu_shares.spread(nodes, rank_num)
    assert abs(places.count(0) - places.count(1)) <= 1 and places == sorted(places)
    allowed = numa.cores_together(range(16), sysfs)
    shares = [binding.share_of(rank, places, nodes, allowed) for rank in range(rank_num)]
    cores = [{cpu % 8 for cpu in share.cpus} for share in shares]
    if rank_num > 1:
        assert set().union(*(share.cpus for share in shares)) == set(range(16))
    for rank, share in enumerate(shares):
        assert set(share.cpus) <= set(nodes[places[rank]])
        if rank_num in (1, 2, 4, 8):
            assert all(not cores[rank] & cores[other] for other in range(rank_num) if other != rank)
    assert sum(len(share.cpus) for share in shares) == (16 if rank_num > 1 else 8)


def test_more_ranks_than_cpus_share_and_a_node_out_of_reach_is_an_error(tmp_path) -> None:
    nodes = numa.read_nodes(two_sockets(tmp_path))
    shares = [binding.share_of(rank, [0] * 5, nodes, [0, 1]) for rank in range(5)]
    assert all(len(share.cpus) == 1 for share in shares)
    with pytest.raises(ConfigError, match="any core of node 1"):
        binding.share_of(0, [1], nodes, [0, 1])


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").exists(), reason="the kernel lists no NUMA nodes here"
)
def test_every_thread_of_a_process_is_bound() -> None:
    code = (
        "import os, threading, time\n"
        "from pathlib import Path\n"
        "from zerobench.bench.rank.binding import bind_rank\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "found = bind_rank(1, num_ranks=2)\n"
        "tasks = [int(task.name) for task in Path('/proc/self/task').iterdir()]\n"
        "assert len(tasks) > 1\n"
        "assert all(os.sched_getaffinity(task) == set(found.cpus) for task in tasks), found\n"
        "print(found)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("node ")
    assert len(os.sched_getaffinity(0)) >= 1
