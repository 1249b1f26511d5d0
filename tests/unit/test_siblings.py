"""Jobs that run at the same time: the seat that one of them has, and servers that fork servers."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.seat import Seat
from zerobench.bench.launch.sibling import SiblingLauncher
from zerobench.bench.protocol.job import Turn
from zerobench.bench.protocol.messages import TRAIN

pytestmark = pytest.mark.slow  # starts fork servers


@pytest.fixture
def ranks():
    """The ends of two ranks' sockets: ours and theirs."""
    pairs = [socket.socketpair() for _ in range(2)]
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def seated(ranks) -> Seat:
    seat = Seat()
    seat.open({rank: ours.fileno() for rank, (ours, _) in enumerate(ranks)})
    return seat


def test_an_order_reaches_every_rank(ranks) -> None:
    seated(ranks).order(TRAIN)
    assert [theirs.recv(10) for _, theirs in ranks] == [TRAIN, TRAIN]


def test_a_job_waits_once_all_of_its_ranks_wait(ranks) -> None:
    seat = seated(ranks)
    seat.answer(0, Turn())
    assert not seat.is_waiting
    seat.answer(1, Turn())
    assert seat.is_waiting
    seat.order(TRAIN)
    assert not seat.is_waiting


def test_answers_are_those_to_the_last_order(ranks) -> None:
    seat = seated(ranks)
    for step_ms in (1.0, 2.0):
        seat.order(TRAIN)
        for rank in range(2):
            seat.answer(rank, Turn(step_ms=step_ms))
    assert seat.answers() == [Turn(step_ms=2.0)] * 2


def test_a_job_that_is_over_answers_nothing(ranks) -> None:
    seat = seated(ranks)
    seat.answer(0, Turn())
    seat.close()
    assert seat.answers() is None and not seat.is_waiting


def test_an_order_to_a_rank_that_has_ended_is_no_error(ranks) -> None:
    (ours, theirs), _ = ranks
    seat = Seat()
    seat.open({0: ours.fileno()})
    theirs.close()
    seat.order(TRAIN)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def ends(pid: int, *, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


@pytest.fixture(scope="module")
def first():
    pytest.importorskip("torch")
    with Launcher() as launcher:
        yield launcher


def opened(first: Launcher) -> SiblingLauncher:
    sibling = SiblingLauncher(first)
    sibling._connect()
    return sibling


@pytest.mark.slow
def test_a_sibling_server_is_forked_and_ends_when_its_launcher_closes(first) -> None:
    sibling = opened(first)
    assert first._server is not None
    assert parent_of(sibling._pid) == first._server.pid != os.getpid()
    sibling.close()
    assert ends(sibling._pid) and not sibling.scratch.exists()  # reaped, too


@pytest.mark.slow
def test_a_server_serves_on_when_its_sibling_was_killed(first) -> None:
    killed, other = opened(first), opened(first)
    killed.kill()
    assert ends(killed._pid)
    killed.close()
    assert is_alive(other._pid)
    other.close()
    opened(first).close()


@pytest.mark.slow
def test_siblings_end_with_the_first_server(first) -> None:
    sibling = opened(first)
    first._server.kill()
    assert ends(sibling._pid)
    sibling.close()
