"""Hosts that die: ranks of the others end within the timeout, with an error that names the host and the rank."""

from __future__ import annotations

import time
from pathlib import Path

import pretended_hosts
import pytest
import ranks
import small_models
import zoo

import zerobench
from zerobench import errors

TIMEOUT_S = 3.0
GRACE_S = 20.0  # what a loaded machine may take on top
WORLD_SIZE, VICTIM = 3, 1
CASE = zoo.Case(small_models.Chain)


def train_until_lost(rank, hosts, stage, folder):
    """Train without end; return the error that ended it."""
    own = pretended_hosts.become_host(rank, hosts)
    settings = {"stage": stage, "timeout_s": TIMEOUT_S, **own, **zoo.optimizer_config(CASE)}
    engine = zerobench.initialize(zoo.make(CASE), config=rank.config(**settings))
    for step in range(1_000_000):
        try:
            zoo.run_plan(engine, CASE, step, rank.rank, [])
        except errors.CommunicationError as error:
            return str(error), error.rank
        if step == 3:
            (Path(folder) / str(rank.rank)).touch()
    return None


def errors_of_survivors(hosts, stage, folder, end_host):
    """Return the errors of the other ranks, after ``end_host`` has ended the victim's host while all trained."""
    with ranks.Group(train_until_lost, hosts, stage, str(folder), world_size=WORLD_SIZE) as group:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < WORLD_SIZE:
            assert time.monotonic() < deadline, "the ranks did not begin to train"
            time.sleep(0.02)
        end_host(group)
        survivors = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
        group.wait(survivors, timeout_s=TIMEOUT_S + GRACE_S)
        for rank in survivors:
            assert group.outcomes[rank].error is None, group.outcomes[rank].error
        return [group.outcomes[rank].value for rank in survivors]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_host_whose_processes_are_killed_is_named(tmp_path, stage):
    hosts = pretended_hosts.on_loopback()
    for message, rank in errors_of_survivors(hosts, stage, tmp_path, lambda group: group.kill(VICTIM)):
        assert "rank 1 on host 'host-1' has ended during" in message
        assert rank == VICTIM


def test_a_host_whose_link_goes_down_is_named(tmp_path):
    with pretended_hosts.make_network(WORLD_SIZE, "1gbit") as network:
        hosts = pretended_hosts.in_namespaces(network)
        for message, rank in errors_of_survivors(hosts, 2, tmp_path, lambda group: network.cut(VICTIM)):
            assert "rank 1 on host 'host-1' cannot be reached during" in message
            assert rank == VICTIM
