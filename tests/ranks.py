"""Runs a function on several ranks, each a process of its own, forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch._dynamo",  # which starting an engine imports: most of a second
    "pytest",
    "zerobench.engine.engine",
    "zerobench.models.transformer",
    "zerobench.strategies.zero",
]
_numbers = itertools.count()


@dataclass(frozen=True)
class Rank:
    """Who the running function is."""

    rank: int
    world_size: int
    meeting_point: str

    def config(self, **values: Any) -> dict[str, Any]:
        """A configuration for ``zerobench.initialize`` with this rank's place in it."""
        place = {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.rank,
            "local_world_size": self.world_size,
            "rendezvous": self.meeting_point,
            "timeout_s": 20.0,
            "threads": 1,
            "pin_threads": False,
        }
        return place | values


@dataclass
class Outcome:
    """How a rank ended: its value, or the traceback of what it raised, or nothing where it was killed."""

    value: Any = None
    error: str | None = None
    exit_code: int | None = None


class Group:
    """Running ranks. Kills what is left when the block ends."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        meeting_point = f"zerobench-tests-{os.getpid()}-{next(_numbers)}-{time.monotonic_ns()}"
        self._readers: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(writer, function, Rank(rank, world_size, meeting_point), arguments),
                daemon=True,
            )
            process.start()
            writer.close()
            self._readers.append(reader)
            self.processes.append(process)
        self.outcomes = [Outcome() for _ in range(world_size)]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for reader in self._readers:
            reader.close()

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(self, ranks: Sequence[int] | None = None, *, timeout_s: float = 120.0) -> None:
        """Wait until these ranks (default: all) have ended or ``timeout_s`` is over, which fails."""
        ranks = range(len(self.processes)) if ranks is None else ranks
        deadline = time.monotonic() + timeout_s
        waiting = {self._readers[rank]: rank for rank in ranks}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                errors = [
                    f"\nrank {rank}: {found.error}" for rank, found in enumerate(self.outcomes) if found.error
                ]
                raise AssertionError(
                    f"ranks {sorted(waiting.values())} did not end within {timeout_s:g} s{''.join(errors)}"
                )
            for reader in ready:
                rank = waiting.pop(reader)
                with contextlib.suppress(EOFError):  # it was killed
                    self.outcomes[rank] = pickle.loads(reader.recv_bytes())
        for rank in ranks:
            self.processes[rank].join(timeout=max(1.0, deadline - time.monotonic()))
            self.outcomes[rank].exit_code = self.processes[rank].exitcode


def run(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, timeout_s: float = 240.0
) -> list[Any]:
    """``function(rank, *arguments)`` on every rank; the values by rank. Raises with the tracebacks of all failures."""
    with Group(function, *arguments, world_size=world_size) as group:
        group.wait(timeout_s=timeout_s)
    failed = [
        f"rank {rank} (exit code {outcome.exit_code}): {outcome.error or 'died'}"
        for rank, outcome in enumerate(group.outcomes)
        if outcome.error or outcome.exit_code != 0
    ]
    if failed:
        raise AssertionError("\n".join(failed))
    return [outcome.value for outcome in group.outcomes]


def run_checks(rank: Rank, checks: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> list[str | None]:
    """Calls every check with this rank and its arguments; what each raised."""
    errors: list[str | None] = []
    for index, (check, arguments) in enumerate(checks):
        try:
            # Its own meeting point: a check that fails on one rank must not make the ranks miss each other in the next.
            check(replace(rank, meeting_point=f"{rank.meeting_point}-{index}"), *arguments)
            errors.append(None)
        except BaseException:  # pytest's own failures are no Exceptions
            errors.append(traceback.format_exc())
    return errors


def _run(writer: Connection, function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    outcome = Outcome()
    try:
        outcome.value = function(rank, *arguments)
    except BaseException:
        outcome.error = traceback.format_exc()
    writer.send_bytes(pickle.dumps(outcome))  # plain bytes: torch would send tensors through shared memory
    writer.close()


# What a test module starts must find the modules beside it.
sys.path[:0] = [path for path in (str(Path(__file__).parent),) if path not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([*(path for path in sys.path if path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
)
