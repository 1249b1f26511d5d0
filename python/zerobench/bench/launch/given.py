"""Ranks that torchrun or srun started: each starts its own fork server, rank 0 leads and the others follow.

Every job still runs in fresh processes, one forked by each given rank, so a configuration that crashes takes no given
rank with it. Rank 0 plans, writes the results and hands jobs over a torch Store; the others run their part of each.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from zerobench.bench.launch.environments import meeting_point, rank_environment
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.launch.ranks import ProgressCallback
from zerobench.bench.protocol.job import Job, Report
from zerobench.bench.protocol.place import MachinePlace
from zerobench.errors import ConfigError, Error
from zerobench.host.facts import HostFacts, read_host_facts
from zerobench.host.identity import HOST_VARIABLE
from zerobench.host.launched import expect_rank, number_in, with_slurm
from zerobench.host.places import place_among

_POLL_S = 0.5
_ANSWER_MARGIN_S = 60.0
_CONNECT_S = 300.0
_CONNECT_TURN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class GivenRank:
    """This process's place among the ranks that it was started with."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    met_machine: MachinePlace | None = None  # None where one launcher started all ranks
    store: Any = field(default=None, repr=False, compare=False)  # that they share, once it is connected

    @property
    def machine(self) -> MachinePlace:
        return self.met_machine or MachinePlace.of_one_launcher(self.local_rank, self.local_world_size)

    def open_launcher(self) -> GivenLauncher:
        return GivenLauncher(self)


def given_ranks(environment: Mapping[str, str]) -> GivenRank | None:
    """From torchrun's variables, else from srun's; None in a process of its own."""
    environment = with_slurm(environment)
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [
        name
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in environment
    ]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set and {', '.join(missing)} not: use torchrun, or unset them"
        )
    given = GivenRank(
        rank=number_in(environment, "RANK"),
        world_size=number_in(environment, "WORLD_SIZE"),
        local_rank=number_in(environment, "LOCAL_RANK"),
        local_world_size=number_in(environment, "LOCAL_WORLD_SIZE"),
        master_addr=environment["MASTER_ADDR"],
        master_port=number_in(environment, "MASTER_PORT"),
    )
    expect_rank(given.rank, given.world_size)
    if not 0 < given.master_port < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT is {given.master_port}, which is not a TCP port: use one from 1 to 65535"
        )
    return given


def meet(given: GivenRank, environment: Mapping[str, str]) -> GivenRank:
    """Return this rank with its places among the ranks of its host and of its machine. Collective where ranks of
    several launchers may share one; one launcher numbers all of its ranks."""
    is_named = bool(environment.get(HOST_VARIABLE))
    if given.world_size == 1 or (given.local_world_size == given.world_size and not is_named):
        return given
    return placed(replace(given, store=connect(given)), read_host_facts())


def placed(given: GivenRank, host: HostFacts) -> GivenRank:
    """Return this rank with the places that follow from what all given ranks tell in their store. Collective."""
    mine = {
        # A local rank is the number of a GPU, so launchers that see other GPUs number their ranks apart.
        "host": [host.identity, host.environment.get("CUDA_VISIBLE_DEVICES")],
        "machine": host.machine,
        "cores": [host.machine, host.cpus],
        "local": [given.local_rank, given.local_world_size],
    }
    everyone = exchange(given, mine)
    told = {key: [its[key] for its in everyone] for key in mine}
    local_rank, local_world_size = place_among(given.rank, told["host"], told["local"])
    core_rank, num_core_ranks = place_among(given.rank, told["cores"], told["local"])
    machine = MachinePlace(told["machine"].count(host.machine), core_rank, num_core_ranks)
    return replace(given, local_rank=local_rank, local_world_size=local_world_size, met_machine=machine)


def exchange(given: GivenRank, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what all given ranks tell, by rank. Rank 0 collects it, so that each other rank reads one key. Raise Error
    where a rank tells nothing for five minutes."""
    store, everyone = given.store, "places"
    store.set(f"place/{given.rank}", json.dumps(mine))
    deadline = time.monotonic() + _CONNECT_S
    if given.rank == 0:
        told = []
        for rank in range(given.world_size):
            if not wait_for(store, f"place/{rank}", until=deadline):
                raise Error(
                    f"rank {rank} of the given ranks did not start within {_CONNECT_S:g} s; start a launcher on every "
                    f"host, and set {HOST_VARIABLE} on all ranks or on none"
                )
            told.append(json.loads(store.get(f"place/{rank}")))
        store.set(everyone, json.dumps(told))
    wait_for(store, everyone)
    found: list[dict[str, Any]] = json.loads(store.get(everyone))
    return found


def connect(given: GivenRank) -> Any:
    """A store that all given ranks share: torchrun's own, else one that rank 0 serves."""
    if given.store is not None:
        return given.store
    import torch.distributed as dist

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = not agent and given.rank == 0
    try:
        socket.getaddrinfo(given.master_addr, given.master_port)
        if not serves:
            wait_for_server(given.master_addr, given.master_port)
        store = in_a_thread(
            dist.TCPStore,
            given.master_addr,
            given.master_port,
            None if agent else given.world_size,
            is_master=serves,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
    except (OSError, RuntimeError, ValueError, FutureTimeout) as error:  # torch's are of the middle two kinds
        what = "serve" if serves else "reach"
        reason = (str(error).splitlines() or [f"no answer for {_CONNECT_S:g} s"])[0]
        raise Error(
            f"rank {given.rank} cannot {what} the ranks' store at {given.master_addr}:{given.master_port} ({reason}); "
            "check MASTER_ADDR and MASTER_PORT, and that rank 0 runs"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"zerobench/{attempt}", store)


def in_a_thread(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call ``make`` in another thread and return its result. torch's store ignores signals while it connects, and waits
    forever if something else listens at the address; the calling thread does neither."""
    made: Future[Any] = Future()

    def work() -> None:
        try:
            made.set_result(make(*arguments, **options))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return made.result(timeout=_CONNECT_S)


def wait_for_server(address: str, port: int) -> None:
    """Until somebody listens there; in Python, where signals are seen meanwhile. OSError after five minutes."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TURN_S).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Answer(BaseModel):
    """A given rank's part of a job's outcome."""

    status: Literal["ok", "oom", "failed", "skipped"]
    secondary: bool  # failed only because others did
    reports: dict[int, Report]
    error: str | None
    oom_tier: Literal["device", "host"] | None = None
    failed_at_s: float | None  # time.time(), where a rank failed by itself

    @classmethod
    def of(cls, outcome: Outcome) -> Answer:
        return cls(
            failed_at_s=outcome.failed_at_s if math.isfinite(outcome.failed_at_s) else None,
            status=outcome.status,
            secondary=outcome.secondary,
            reports=outcome.reports,
            error=outcome.error,
            oom_tier=outcome.oom_tier,
        )

    def text(self) -> str:
        """JSON in which a loss that is not finite stays one: pydantic's own would write null."""
        return json.dumps(self.model_dump(mode="json"))

    @classmethod
    def from_text(cls, text: str | bytes) -> Answer:
        return cls.model_validate(json.loads(text))


class GivenLauncher(Launcher):
    """Rank 0's launcher: runs its own rank of a job and collects the others' outcomes."""

    def __init__(self, given: GivenRank) -> None:
        super().__init__()
        self._given = given
        self._store = connect(given)
        self._sequence = 0

    def run(self, job: Job, *, log: Path, on_progress: ProgressCallback | None = None, **_: Any) -> Outcome:
        self._sequence += 1
        shared = {
            **meeting_point("127.0.0.1" if job.num_ranks == 1 else self._given.master_addr),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # a job's ranks meet on ports of their own
        }
        request = {"job": job.model_dump(mode="json"), "environment": shared, "log": str(log.absolute())}
        self._store.set(f"job/{self._sequence}", json.dumps(request))
        followers = range(1, job.num_ranks)
        part = run_part(super().run, self._given, self._store, self._sequence, job, shared, log, on_progress)
        answers = [Answer.of(part), *(self._answer(rank, job) for rank in followers)]
        return merge(answers)

    def _answer(self, rank: int, job: Job) -> Answer:
        key = f"outcome/{self._sequence}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=job.timeout_s + _ANSWER_MARGIN_S))
        except Exception as error:
            raise Error(
                f"given rank {rank} does not answer; its process ended or its host is down ({type(error).__name__})"
            ) from None
        return Answer.from_text(self._store.get(key))

    def close(self) -> None:
        self._sequence += 1
        self._store.set(f"job/{self._sequence}", json.dumps({"stop": True}))
        super().close()
        if self._given.world_size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._wait_for_goodbyes()

    def _wait_for_goodbyes(self) -> None:
        """The store lives in this process: the followers read the end from it before it goes."""
        keys = [f"goodbye/{rank}" for rank in range(1, self._given.world_size)]
        try:
            self._store.wait(keys, timedelta(seconds=30))
        except Exception as error:
            raise Error(f"not every given rank ended with the comparison ({type(error).__name__})") from None


def run_part(
    run: Any,
    given: GivenRank,
    store: Any,
    sequence: int,
    job: Job,
    shared: dict[str, str],
    log: Path,
    on_progress: ProgressCallback | None,
) -> Outcome:
    """This given rank's part of a job, ended early when another's failed."""
    next_poll_s = 0.0

    def aborted() -> bool:
        nonlocal next_poll_s
        if time.monotonic() < next_poll_s:
            return False
        next_poll_s = time.monotonic() + _POLL_S
        return bool(store.check([f"abort/{sequence}"]))

    local_rank, local_world_size, machine = (
        (0, 1, None) if job.num_ranks == 1 else (given.local_rank, given.local_world_size, given.machine)
    )
    place = rank_environment(
        given.rank,
        job.num_ranks,
        local_rank=local_rank,
        local_world_size=local_world_size,
        machine=machine,
    )
    outcome: Outcome = run(
        job, log=log, on_progress=on_progress, environments=[{**shared, **place}], aborted=aborted
    )
    if outcome.status in ("failed", "oom"):
        store.set(f"abort/{sequence}", str(given.rank))
    return outcome


def follow(given: GivenRank) -> int:
    """Run a given rank other than 0: its part of each job, until rank 0 announces that all is done."""
    store = connect(given)
    try:
        return follow_jobs(given, store)
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):  # rank 0, which waits for this, may be gone
            store.set(f"goodbye/{given.rank}", "1")
        raise


def follow_jobs(given: GivenRank, store: Any) -> int:
    sequence = 0
    with Launcher() as launcher:
        while True:
            sequence += 1
            wait_for(store, f"job/{sequence}")
            request = json.loads(store.get(f"job/{sequence}"))
            if "stop" in request:
                store.set(f"goodbye/{given.rank}", "1")
                return 0
            job = Job.model_validate(request["job"])
            if given.rank >= job.num_ranks:
                continue
            log = follower_log(Path(request["log"]), given.rank, launcher.scratch)
            outcome = run_part(launcher.run, given, store, sequence, job, request["environment"], log, None)
            store.set(f"outcome/{sequence}/{given.rank}", Answer.of(outcome).text())


def wait_for(store: Any, key: str, *, until: float = math.inf) -> bool:
    """Wait for a key, however long its rank takes, and return whether it is there at ``until``, on time.monotonic().
    Raise Error when rank 0's store is gone."""
    try:
        while not (found := store.check([key])) and time.monotonic() < until:
            time.sleep(0.1)
        return bool(found)
    except Exception as error:  # the store's own types differ between torch versions
        raise Error(f"rank 0 of the given ranks ended ({type(error).__name__})") from None


def follower_log(leader_log: Path, rank: int, scratch: Path) -> Path:
    """Beside rank 0's log where that folder is shared between the hosts, else in a folder that goes away."""
    path = leader_log.with_suffix(f".rank{rank}.log")
    return path if path.parent.is_dir() else scratch / path.name


def merge(answers: list[Answer]) -> Outcome:
    """The worst part decides, and of failures the first: the others follow from it."""
    for statuses in (("oom",), ("failed",), ("skipped",)):
        found = [answer for answer in answers if answer.status in statuses]
        if found:
            first = min(found, key=lambda answer: (answer.secondary, answer.failed_at_s or math.inf))
            return Outcome(status=first.status, error=first.error, oom_tier=first.oom_tier)
    return Outcome(
        status="ok", reports={rank: report for answer in answers for rank, report in answer.reports.items()}
    )
