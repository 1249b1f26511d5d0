"""Ranks for a micro-benchmark: forked from the command once torch is imported, gone when it ends. Imports no torch.

The command runs no tensor operation, since a child forked after one OpenMP region hangs. Ranks answer in JSON lines
over a pipe each; whatever ends one of them early ends all of them with one line that says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from zerobench._native import import_torch
from zerobench.errors import Error
from zerobench.host.processes import die_with_parent, write_line

Message = dict[str, Any]
GRACE_S = 2.0  # what the other ranks get to say who is at fault


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Who a rank is and where it meets the others."""

    rank: int
    world_size: int
    rendezvous: str
    store_file: str  # of torch.distributed


def core_of(rank: int, *, world_size: int, core_num: int) -> int:
    """Which core's share of the ranks this one belongs to; each has a core of its own where there are enough."""
    return rank * min(core_num, world_size) // world_size


def bind_crowded_rank(place: RankPlace) -> None:
    """Bind this rank to one CPU if ranks outnumber CPUs. Each CPU gets its share of the ranks, as under MPI launchers.

    Left alone, the scheduler moves such ranks about, and now and then three share a core while one has its own.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if place.world_size > len(cpus):
        core = core_of(place.rank, world_size=place.world_size, core_num=len(cpus))
        os.sched_setaffinity(0, {cpus[core]})


Target = Callable[[RankPlace, Callable[[Message], None]], None]


class Ranks:
    """A group of running ranks: a context that iterates over (rank, message) until all have ended well."""

    def __init__(self, target: Target, *, world_size: int, scratch: str) -> None:
        self._target = target
        self._world_size = world_size
        self._store_file = os.path.join(scratch, f"store_{uuid.uuid4().hex}")
        self._pids: dict[int, int] = {}  # rank: pid, of those not reaped yet
        self._pipes: dict[int, int] = {}

    def __enter__(self) -> Ranks:
        import_torch()  # once here rather than in every rank
        import torch.distributed  # noqa: F401

        rendezvous = uuid.uuid4().hex
        try:
            for rank in range(self._world_size):
                place = RankPlace(
                    rank=rank,
                    world_size=self._world_size,
                    rendezvous=rendezvous,
                    store_file=self._store_file,
                )
                read, write = os.pipe2(os.O_CLOEXEC)
                self._pipes[rank] = read
                parent, pid = os.getpid(), os.fork()
                if pid == 0:
                    run_child(self._target, place, write, parent=parent)
                os.close(write)
                self._pids[rank] = pid
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        for pipe in self._pipes.values():
            os.close(pipe)
        self._pids, self._pipes = {}, {}
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._store_file)

    def messages(self) -> Iterator[tuple[int, Message]]:
        buffers = dict.fromkeys(self._pipes, b"")
        errors: list[str] = []
        deadline = float("inf")
        with selectors.DefaultSelector() as selector:
            for rank, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(timeout=0.2):
                    rank = key.data
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fd)
                        errors += self._reap(rank)
                    *lines, buffers[rank] = (buffers[rank] + chunk).split(b"\n")
                    for message in map(json.loads, lines):
                        if "error" in message:
                            errors.append(f"rank {rank}: {message['error']}")
                        else:
                            yield rank, message
                if errors and deadline == float("inf"):
                    deadline = time.monotonic() + GRACE_S
        if errors:
            raise Error(errors[0])

    def _reap(self, rank: int) -> list[str]:
        _, status = os.waitpid(self._pids.pop(rank), 0)
        if os.WIFSIGNALED(status):
            return [f"rank {rank} was killed by {signal.Signals(os.WTERMSIG(status)).name}"]
        code = os.waitstatus_to_exitcode(status)
        return [f"rank {rank} ended with exit code {code}"] if code else []


def run_child(target: Target, place: RankPlace, pipe: int, *, parent: int) -> NoReturn:
    """A forked rank: never returns."""
    send = partial(write_line, pipe)
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides what Ctrl-C ends
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # libraries may print; the command's terminal shows the table only
            os.dup2(null, standard)
        target(place, send)
        code = 0
    except BaseException as error:
        lines = str(error).strip().splitlines() or ["no message"]
        with contextlib.suppress(OSError):
            send({"error": f"{type(error).__name__}: {lines[0]}"})
    finally:
        os._exit(code)
