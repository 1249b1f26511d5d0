"""Hosts that die: ranks of the others end within the timeout, with an error that names the host and the rank."""

from __future__ import annotations

import contextlib
import signal
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
WORLD_SIZE = 3
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


@contextlib.contextmanager
def training(hosts, stage, folder):
    """Yield ranks that have begun to train."""
    with ranks.Group(train_until_lost, hosts, stage, str(folder), world_size=WORLD_SIZE) as group:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < WORLD_SIZE:
            assert time.monotonic() < deadline, "the ranks did not begin to train"
            time.sleep(0.02)
        yield group


def assert_named(group, survivors, victim, how):
    """Wait for the survivors, and compare the rank and the host that their errors name."""
    group.wait(survivors, timeout_s=TIMEOUT_S + GRACE_S)
    for survivor in survivors:
        assert group.outcomes[survivor].error is None, group.outcomes[survivor].error
        message, rank = group.outcomes[survivor].value
        assert f"rank {victim} on host 'host-{victim}' {how} during" in message
        assert rank == victim


@pytest.mark.parametrize(
    ("stage", "victim", "survivors"),
    [(0, 1, [0, 2]), (3, 1, [0, 2]), pytest.param(3, 0, [1, 2], id="the host of the store")],
)
def test_a_host_whose_processes_are_killed_is_named(tmp_path, stage, victim, survivors):
    with training(pretended_hosts.on_loopback(), stage, tmp_path) as group:
        group.kill(victim)
        assert_named(group, survivors, victim, "has ended")


def test_a_rank_that_ended_because_of_the_lost_host_is_not_named(tmp_path):
    with training(pretended_hosts.on_loopback(), 3, tmp_path) as group:
        group.kill(2, signal.SIGSTOP)
        group.kill(1)
        assert_named(group, [0], 1, "has ended")
        group.kill(2, signal.SIGCONT)  # rank 0 has ended by now
        assert_named(group, [2], 1, "has ended")


def test_a_host_whose_link_goes_down_is_named(tmp_path):
    with (
        pretended_hosts.make_network(WORLD_SIZE, "1gbit") as network,
        training(pretended_hosts.in_namespaces(network), 2, tmp_path) as group,
    ):
        network.cut(1)
        assert_named(group, [0, 2], 1, "cannot be reached")
