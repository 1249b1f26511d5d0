"""Ranks divide their machine's CPUs by what they tell each other, and engines run there."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

import zerobench
from zerobench import _native
from zerobench.engine import rank_cpus, topology
from zerobench.engine.config import parse
from zerobench.engine.engine import Engine
from zerobench.errors import ConfigError
from zerobench.host.cpu_shares import part_of
from zerobench.host.facts import HostFacts, read_host_facts
from zerobench.host.numa import read_nodes

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is no node of several")


def two_nodes() -> dict[int, list[int]]:
    """This machine's CPUs as if every other one were on another node: no share of contiguous numbers is one of these.
    Of four or more CPUs."""
    allowed = sorted(os.sched_getaffinity(0))[: len(os.sched_getaffinity(0)) // 2 * 2]
    return {0: allowed[1::2], 1: allowed[::2]}


def cpus_of_threads() -> set[tuple[int, ...]]:
    return {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in Path("/proc/self/task").iterdir()}


def host_of_two_nodes(folder: str, gpu_nodes: Sequence[int | None] = ()) -> HostFacts:
    """Return this host's facts with nodes and GPUs as the kernel would show them in ``folder``."""
    files = {f"devices/system/node/node{node}/cpulist": cpus for node, cpus in two_nodes().items()}
    for gpu, node in enumerate(gpu_nodes):
        files[f"bus/pci/devices/{bus_id(gpu)}/numa_node"] = [-1 if node is None else node]
    for name, numbers in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True)
        path.write_text(",".join(map(str, numbers)))
    return dataclasses.replace(read_host_facts(), sysfs=Path(folder))


def bus_id(gpu: int) -> str:
    return f"0000:{gpu:02x}:00.0"


def started(rank: ranks.Rank, host: HostFacts | None = None, **config: Any) -> dict[str, Any]:
    place = {"threads": None, "pin_threads": True, "optimizer": {"lr": 0.1}, "stage": 1}
    engine = Engine(torch.nn.Linear(8, 8), parse(rank.config(**(place | config))), host=host)
    found = {"text": engine.update_cpus, "threads": cpus_of_threads()}
    engine.close()
    return found


def on_two_nodes(rank: ranks.Rank, config: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, {cpu for cpus in two_nodes().values() for cpu in cpus})  # equally many on each
    with tempfile.TemporaryDirectory() as folder:
        return started(rank, host_of_two_nodes(folder), **config)


@pytest.mark.parametrize("config", [{}, {"offload_optimizer": {"device": "cpu"}}])
def test_ranks_without_gpus_take_a_node_each(config: dict[str, Any]) -> None:
    found, nodes = ranks.run(on_two_nodes, config, world_size=2), two_nodes()
    for rank, node in enumerate(nodes):
        assert f"on node {node}: " in found[rank]["text"] and "node that is its turn" in found[rank]["text"]
        pinned = {cpus for cpus in found[rank]["threads"] if len(cpus) == 1}
        assert {(cpu,) for cpu in nodes[node][1:]} <= pinned  # the caller counts as the first


def test_configured_cpus_win() -> None:
    cpu = two_nodes()[1][0]
    for rank in ranks.run(on_two_nodes, {"cpus": [cpu]}, world_size=2):
        assert rank["text"] == f"1 pinned thread on node 1: {cpu} (as configured)"


def with_gpus(rank: ranks.Rank, gpu_nodes: list[int | None]) -> tuple[tuple[int, ...], str]:
    """As an engine with such a GPU asks; no GPU takes part in it."""
    os.sched_setaffinity(0, {cpu for cpus in two_nodes().values() for cpu in cpus})
    config = parse(rank.config())
    place = topology.resolve(config, os.environ)
    communicators = topology.make_communicators(_native.load(), config, place, environment=os.environ)
    with tempfile.TemporaryDirectory() as folder:
        host = host_of_two_nodes(folder, gpu_nodes)
        share = rank_cpus.rank_cpus(config, place, communicators.reduce, host, gpu_bus_id=bus_id(rank.rank))
    communicators.close()
    return share.cpus, share.reason


def test_ranks_that_see_their_own_gpu_alone_share_its_node() -> None:
    nodes = {node: tuple(cpus) for node, cpus in two_nodes().items()}
    crossed = ranks.run(with_gpus, [1, 0], world_size=2)
    assert crossed == [(nodes[1], "node of its GPU"), (nodes[0], "node of its GPU")]
    together = ranks.run(with_gpus, [1, 1], world_size=2)
    assert {cpu for cpus, _ in together for cpu in cpus} == {cpu for cpus in nodes.values() for cpu in cpus}
    assert all("some nodes have no rank's GPU" in reason for _, reason in together)
    unknown = ranks.run(with_gpus, [1, None], world_size=2)
    assert all("not every GPU" in reason for _, reason in unknown)
    assert not set(unknown[0][0]) & set(unknown[1][0])


def started_with_own_mask(rank: ranks.Rank) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        host = host_of_two_nodes(folder)
        own = two_nodes()[rank.rank]
        os.sched_setaffinity(0, own)
        return started(rank, dataclasses.replace(host, cpus=tuple(own)))


def test_a_rank_takes_all_of_what_its_launcher_gave_it_alone() -> None:
    for node, rank in enumerate(ranks.run(started_with_own_mask, world_size=2)):
        assert f"{len(two_nodes()[node])} pinned thread" in rank["text"] and "launcher" in rank["text"]


def test_a_host_with_one_node_is_divided_by_contiguous_numbers() -> None:
    if len(read_nodes()) > 1:
        pytest.skip("this machine has several nodes")
    for rank, found in enumerate(ranks.run(started, world_size=2)):
        cpus = part_of(sorted(os.sched_getaffinity(0)), rank, 2)
        assert found["text"].endswith("(even share)")
        assert {(cpu,) for cpu in cpus[1:]} <= found["threads"]


def told(machine: bytes, place: int, num_ranks: int = 2) -> rank_cpus.Told:
    return rank_cpus.Told(machine, b"mask", place, num_ranks, has_gpu=1, gpu_node=-1)


def test_ranks_outside_of_the_engine_leave_the_facts_of_a_machine_incomplete() -> None:
    mine = told(b"a", 1)
    spread = [told(b"a", 0), told(b"b", 0), mine, told(b"b", 1)]
    facts = rank_cpus.ranks_of_machine(spread, mine)
    assert facts is not None and [fact.gpu_node for fact in facts] == [None, None]
    assert rank_cpus.ranks_of_machine([told(b"a", 0)], told(b"a", 0)) is None


def test_messages_keep_what_is_told() -> None:
    messages = [told(bytes([rank] * 16), rank)._replace(allowed=b"m" * 16) for rank in range(3)]

    class Everyone:
        def exchange(self, message: bytes) -> bytes:
            assert message == messages[1].packed()
            return b"".join(each.packed() for each in messages)

    assert rank_cpus.tell(Everyone(), messages[1]) == messages


def test_a_cpu_out_of_reach_is_an_error_before_ranks_meet() -> None:
    with pytest.raises(ConfigError, match="cpus names CPU 99999"):
        zerobench.initialize(
            torch.nn.Linear(2, 2),
            config={"world_size": 2, "rank": 0, "cpus": [99999], "rendezvous": uuid.uuid4().hex},
        )
