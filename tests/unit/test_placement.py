"""How many threads an engine updates with, and where they run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

import zerobench
from zerobench.engine import placement
from zerobench.engine.config import parse
from zerobench.engine.engine import Engine
from zerobench.engine.placement import CudaDevices
from zerobench.engine.topology import Topology
from zerobench.errors import ConfigError
from zerobench.host import numa
from zerobench.host.cpu_shares import CpuShare
from zerobench.host.facts import read_host_facts

CPUS = list(range(8, 24))


def threads(
    quota: float | None, *, ranks: int = 1, beside_gpu: bool = False, **config
) -> tuple[int, list[int]]:
    """Return number and CPUs of the threads of a rank that has a share of 16 CPUs."""
    parsed, topology = parse(config), Topology(0, ranks, 0, ranks)
    found = placement.update_threads(
        parsed, topology, CPUS, quota=quota, asked=parsed.threads, beside_gpu=beside_gpu
    )
    return found.num, found.pinned_to


def test_without_a_smaller_quota_each_cpu_has_its_thread() -> None:
    for quota in (None, 16.0, 64.0):
        assert threads(quota) == (16, CPUS)
    assert threads(None, beside_gpu=True) == (15, CPUS)
    assert threads(128.0, ranks=8) == (16, CPUS)
    assert threads(None, pin_threads=False) == (16, [])


def test_a_quota_is_shared_by_the_ranks_of_a_host() -> None:
    assert threads(8.0) == (8, [])
    assert threads(8.0, beside_gpu=True) == (7, [])
    assert threads(17.5, ranks=4) == (4, [])
    assert threads(1.5, ranks=4) == (1, [])
    assert threads(2.0, beside_gpu=True) == (2, [])


def test_what_is_configured_stays() -> None:
    assert threads(2.0, threads=12) == (12, CPUS)
    assert threads(4.0, cpus=CPUS) == (4, CPUS)
    assert threads(4.0, cpus=CPUS, pin_threads=False) == (4, [])
    assert threads(None, threads=17) == (17, [])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU has one thread anyway")
def test_an_engine_on_the_cpu_and_off_the_device_goes_by_the_quota() -> None:
    def threads_made(section: dict, quota: float | None) -> int:
        tasks = Path("/proc/self/task")
        before = len(list(tasks.iterdir()))
        config = {"stage": 1, "world_size": 1, "optimizer": {"type": "adamw", "lr": 0.1}, **section}
        host = dataclasses.replace(read_host_facts(), cpu_quota=quota)
        engine = Engine(torch.nn.Linear(4, 4), parse(config), host=host)
        made = len(list(tasks.iterdir())) - before
        engine.close()
        return made

    section = {"offload_optimizer": {"device": "cpu"}}
    more, more_off_device = (threads_made(each, None) - threads_made(each, 1.0) for each in ({}, section))
    cpu_num = len(os.sched_getaffinity(0))
    assert (more, more_off_device) == (cpu_num - 1, 2 * (cpu_num - 1))


def test_a_node_that_the_host_lacks_is_named() -> None:
    if not numa.lacks_node(4095):
        pytest.skip("the kernel lists no NUMA nodes here")
    config = {"stage": 1, "world_size": 1, "offload_optimizer": {"numa_node": 4095}}
    with pytest.raises(
        ConfigError, match=r"offload_optimizer\.numa_node 4095 is not a NUMA node of this host"
    ):
        zerobench.initialize(model=torch.nn.Linear(4, 4), config=config)


def test_what_updates_where_is_said_in_words() -> None:
    share = CpuShare(tuple(CPUS), (1,), "node of its GPU")

    def text(quota: float | None, *, beside_gpu: bool = False, **config) -> str | None:
        topology = Topology(0, 1, 0, 1)
        return placement.cpu_use(parse(config), topology, share, quota=quota, beside_gpu=beside_gpu).text

    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert text(None) == "16 pinned threads on node 1: 8-23 (node of its GPU)"
    assert text(1.0, **offload) == "1 thread for node 1: 8-23 (node of its GPU)"
    assert text(None, beside_gpu=True, **offload) == "15 pinned threads on node 1: 8-23 (node of its GPU)"
    own = {"stage": 1, "offload_optimizer": {"device": "cpu", "threads": 3}}
    assert text(None, beside_gpu=True, **own) == "3 pinned threads on node 1: 8-23 (node of its GPU)"
    assert text(None, beside_gpu=True) is None


@pytest.mark.parametrize(
    ("dtype", "bytes_each", "share"),
    [
        ("float32", 8, 1.0),  # all of it is on the device, where masters are the parameters
        ("float32", 7.9, 7.9 / 12),
        ("float32", 6, 0.5),
        ("bfloat16", 12, 1.0),
        ("bfloat16", 8, 8 / 12),
        ("bfloat16", -1, 0.0),
    ],
)
def test_so_much_of_the_state_fits(dtype, bytes_each, share) -> None:
    def flat(numel: int, *, trainable: bool) -> dict[str, object]:
        return {"shard_numel": numel, "param_dtype": dtype, "trainable": trainable}

    units = [{"flats": [flat(600, trainable=True), flat(9000, trainable=False)]}]
    units.append({"flats": [flat(400, trainable=True)]})
    assert placement.fitting_share(units, free_bytes=round(1000 * bytes_each)) == pytest.approx(share)


def test_what_is_free_is_below_the_limit_by_the_peak_what_comes_and_a_margin() -> None:
    def free(ranks: int = 1, **figures) -> int:
        return placement.CpuPlace(Topology(0, ranks, 0, ranks)).free_bytes(**figures)

    place = placement.CpuPlace(Topology(0, 1, 0, 1))
    place.begin_trial()
    limited = free(limit_bytes=1 << 40, extra_bytes=0)
    assert limited == pytest.approx(0.98 * (1 << 40), abs=1 << 30)
    assert limited - free(limit_bytes=1 << 39, extra_bytes=0) == pytest.approx(0.98 * (1 << 39), abs=1 << 20)
    assert limited - free(limit_bytes=1 << 40, extra_bytes=1 << 36) == pytest.approx(1 << 36, rel=0.02)
    # Without a limit, a rank's part of the host.
    whole, part = free(limit_bytes=None, extra_bytes=0), free(4, limit_bytes=None, extra_bytes=0)
    assert part == pytest.approx(whole / 4, rel=0.2)


def cuda_index(
    topology: Topology,
    devices: CudaDevices | None,
    *,
    model: torch.nn.Module | None = None,
    **config,
) -> int | None:
    """Return the device that is chosen; where ``devices`` is None, nobody may ask for them."""

    def read_devices() -> CudaDevices:
        assert devices is not None, "asking for devices initialises CUDA"
        return devices

    return placement.cuda_index(model or torch.nn.Linear(1, 1), parse(config), topology, read_devices)


def test_ranks_that_are_shown_a_device_each_learn_what_to_do() -> None:
    """As Slurm's --gpus-per-task shows them."""
    topology = Topology(3, 4, 3, 4, launched=(3, 4))
    with pytest.raises(
        ConfigError, match=r"CUDA device 3, by its local rank, and torch sees 1; if each rank sees"
    ):
        cuda_index(topology, CudaDevices(num=1, current=0), device="cuda")
    assert cuda_index(topology, CudaDevices(num=2, current=0), device="cuda", communicator="peer") == 1


@pytest.mark.parametrize(
    ("launched", "current", "index"),
    [
        ((3, 4), 0, 3),  # rank 1 of the group {2, 3}: the launcher knows its device
        ((0, 4), 2, 0),
        (None, 3, 3),  # the script called torch.cuda.set_device
        (None, 0, 1),
    ],
)
def test_the_launcher_then_the_script_then_the_local_rank_choose_the_device(launched, current, index) -> None:
    topology = Topology(1, 2, 1, 2, launched=launched, is_part=True)
    assert cuda_index(topology, CudaDevices(num=4, current=current), device="cuda") == index


def test_parameters_without_memory_go_to_a_device_where_torch_sees_one() -> None:
    on_meta, topology = torch.nn.Linear(1, 1, device="meta"), Topology(1, 2, 1, 2)
    assert cuda_index(topology, CudaDevices(num=2, current=0), model=on_meta) == 1
    assert cuda_index(topology, CudaDevices(num=0, current=0), model=on_meta) is None
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        cuda_index(topology, CudaDevices(num=0, current=0), device="cuda")


def test_an_engine_that_stays_on_the_cpu_asks_for_no_cuda_device() -> None:
    assert cuda_index(Topology(0, 1, 0, 1), None) is None
    assert (
        cuda_index(Topology(0, 1, 0, 1), None, model=torch.nn.Linear(1, 1, device="meta"), device="cpu")
        is None
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_a_host_without_gpus_has_no_cuda_devices() -> None:
    assert placement.read_cuda_devices() == CudaDevices(num=0, current=0)


@pytest.mark.parametrize(
    ("launched", "is_part", "cpus", "pins"),
    [
        (None, False, None, True),
        ((2, 4), True, None, True),
        (None, True, None, False),  # the other group's ranks would pin to the same CPUs
        (None, True, [0], True),
    ],
)
def test_threads_are_pinned_where_no_other_group_may_have_the_same_cpus(
    launched, is_part, cpus, pins
) -> None:
    topology = Topology(0, 2, 0, 2, launched=launched, is_part=is_part)
    threads = placement.update_threads(parse({"cpus": cpus}), topology, [0], quota=None, asked=None)
    assert threads.pinned_to == ([0] if pins else [])
