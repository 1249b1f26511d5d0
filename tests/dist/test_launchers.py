"""Ranks of two launchers on one machine share its cores, and are of one host unless ZEROBENCH_HOST says otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import rank_scripts
import torch
from launchers import run_launchers
from test_script_ranks import start_afresh

from zerobench.bench.launch.environments import free_ports
from zerobench.host.numa import parse_list

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided")


def started(folder: Path, how: str, hosts: tuple[str, str]) -> list[dict[str, Any]]:
    """Return what the rank of each of two launchers found. ``hosts``: their ZEROBENCH_HOST."""
    environments = []
    for host in hosts:
        environment = dict(os.environ)
        start_afresh(environment, **({"ZEROBENCH_HOST": host} if host else {}))
        environments.append(environment)
    run_launchers([rank_scripts.__file__, str(folder), how], environments, port=free_ports(1)[0])
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def cpus_of(text: str) -> list[int]:
    match = re.search(r": ([\d,-]+) \(", text)
    assert match is not None, text
    return parse_list(match[1])


SAME, TWO = ("", ""), ("left", "right")


@pytest.fixture(scope="module", params=[("cpus", SAME), ("cpus of a group", SAME), ("cpus", TWO)])
def case(request, tmp_path_factory) -> tuple[list[dict[str, Any]], bool]:
    """Findings of both ranks, and whether they are on one host."""
    how, hosts = request.param
    return started(tmp_path_factory.mktemp("launchers"), how, hosts), hosts == SAME


def test_ranks_of_two_launchers_divide_the_cores(case) -> None:
    found, _ = case
    shares = [cpus_of(each["update_cpus"]) for each in found]
    assert not set(shares[0]) & set(shares[1])
    assert sorted(shares[0] + shares[1]) == sorted(os.sched_getaffinity(0))
    for share, each in zip(shares, found, strict=True):
        assert each["update_cpus"].startswith(f"{len(share)} pinned thread")


def test_ranks_of_two_launchers_are_of_one_host_unless_they_pretend(case) -> None:
    found, is_one_host = case
    assert [each["communicator"] for each in found] == ["shm" if is_one_host else "c10d"] * 2
    assert [each["place"][2:] for each in found] == ([(0, 2), (1, 2)] if is_one_host else [(0, 1), (0, 1)])


def test_ranks_of_two_launchers_train_as_one_engine(case) -> None:
    plain = rank_scripts.plain_training([0, 1])
    for each in case[0]:
        for name, tensor in each["parameters"].items():
            torch.testing.assert_close(tensor, plain[name], rtol=0, atol=2e-6)
