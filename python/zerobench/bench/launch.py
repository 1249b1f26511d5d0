"""Runs a job in fresh processes and tells what became of it. Imports no torch.

Ranks are forked by a fork server (forkserver.py) and answer over a pipe each, in JSON lines: progress, then a report,
an error or the reason to be skipped. Logs are for people and are never parsed. A job always ends: with every report,
or a grace after the first failure, or when no rank has made progress for the timeout.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zerobench.bench.forkserver import MESSAGE_LIMIT_BYTES
from zerobench.bench.job import NUM_PASSES, Job, Progress, RankError, Report, Skipped
from zerobench.errors import Error

GRACE_S = 5.0  # what the other ranks get to notice a failure and say so
WATCHDOG_MARGIN_S = 3.0  # communicators, which can name the rank at fault, come first
EXIT_GRACE_S = 15.0
SERVER_START_S = 120.0
ANSWER_S = 60.0  # of the server, also to kill and reap a whole job
_PORTS = range(20000, 32000)  # below the ephemeral range, which outgoing connections take from

ProgressCallback = Callable[[int, Progress], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended: every rank's report, or one line that says why not."""

    status: Literal["ok", "oom", "failed", "skipped"]
    reports: dict[int, Report] = field(default_factory=dict)
    error: str | None = None
    oom_tier: Literal["device", "host"] | None = None  # whose memory ran out
    secondary: bool = False  # failed only because other ranks did
    failed_at_s: float = (
        math.inf
    )  # time.time() of the first failure, which on several hosts tells cause from effect


@dataclass(kw_only=True)
class RankState:
    """What is known of one rank while its job runs."""

    rank: int
    pid: int
    pipe: int
    buffer: bytes = b""
    progress: Progress | None = None
    last_sign_s: float = field(default_factory=time.monotonic)
    report: Report | None = None
    skipped: Skipped | None = None
    error: RankError | None = None
    error_s: float = math.inf
    exit_code: int | None = None
    exit_signal: int | None = None
    exit_s: float = math.inf  # time.time()
    open: bool = True

    @property
    def exited(self) -> bool:
        return self.exit_code is not None or self.exit_signal is not None

    @property
    def ended(self) -> bool:
        return self.exited and not self.open

    @property
    def spoke(self) -> bool:
        return self.report is not None or self.skipped is not None or self.error is not None

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.ended and not self.spoke)


class Launcher:
    """Owns the fork server, which starts with the first job. Close it, or use it as a context."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="zerobench-")

    @property
    def scratch(self) -> Path:
        """A folder of this launcher's own, removed by close()."""
        return Path(self._scratch.name)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop_server()
        self._scratch.cleanup()

    def _stop_server(self) -> None:
        if self._control is not None:
            self._control.close()  # the server kills what runs and ends
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()  # its ranks die with it
                self._server.wait()
            self._server = None

    def _connect(self) -> socket.socket:
        """The socket of a running server; starts one when there is none."""
        if self._control is not None and self._server is not None and self._server.poll() is None:
            return self._control
        self._stop_server()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stderr_path = self.scratch / "forkserver.stderr"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch may ask for GPUs without initialising CUDA before a fork
        }
        with theirs, stderr_path.open("wb") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "zerobench.bench.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the command only, which then ends the ranks
            )
        ours.settimeout(SERVER_START_S)
        self._control = ours
        if "ready" not in self._receive():
            raise Error("the fork server did not say that it is ready: this is a bug of zerobench")
        return ours

    def _receive(self) -> dict[str, Any]:
        """The server's next message."""
        assert self._control is not None and self._server is not None
        try:
            message = self._control.recv(MESSAGE_LIMIT_BYTES)
        except TimeoutError:
            message = b""
        if not message:
            text = (self.scratch / "forkserver.stderr").read_text(errors="replace").strip()
            last = text.splitlines()[-1] if text else "it wrote nothing"
            self._stop_server()
            raise Error(f"the process that starts the ranks ended or does not answer ({last})")
        return json.loads(message)

    def run(
        self,
        job: Job,
        *,
        log: Path,
        on_progress: ProgressCallback | None = None,
        environments: Sequence[Mapping[str, str]] | None = None,
        aborted: Callable[[], bool] | None = None,
    ) -> Outcome:
        """Run ``job`` and wait for its end. By default all its ranks are this host's; under torchrun or srun this
        launcher starts only the ranks that ``environments`` describe, and ``aborted`` tells that others' failed."""
        control = self._connect()
        environments = environments or local_environments(job.num_ranks)
        for environment in environments:
            (self.scratch / f"stack.{environment['RANK']}").write_bytes(b"")
        kills_before = oom_kill_num()
        ranks = self._fork(control, job, environments, log)
        try:
            self._wait(ranks, job, on_progress, aborted)
            stalled = self._stalled(ranks, job)
        finally:
            self._end(ranks)
        was_oom_killed = oom_kill_num() > kills_before
        outcome = judge(
            list(ranks.values()), stalled=stalled, timeout_s=job.timeout_s, was_oom_killed=was_oom_killed
        )
        return replace(outcome, failed_at_s=min(map(failed_at_s, ranks.values())))

    def _fork(
        self, control: socket.socket, job: Job, environments: Sequence[Mapping[str, str]], log: Path
    ) -> dict[int, RankState]:
        request = {
            "op": "fork",
            "environments": [{**environment_of(job), **environment} for environment in environments],
            "job": {**job.model_dump(mode="json"), "scratch": str(self.scratch)},
            "memory_limit_bytes": job.rank_memory_bytes,
        }
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in environments]
        try:
            control.settimeout(ANSWER_S)
            socket.send_fds(control, [json.dumps(request).encode()], [log_fd, *(write for _, write in pipes)])
        finally:
            for fd in (log_fd, *(write for _, write in pipes)):
                os.close(fd)
        pids = self._receive()["pids"]
        states = {}
        for environment, (read, _), pid in zip(environments, pipes, pids, strict=True):
            os.set_blocking(read, False)
            rank = int(environment["RANK"])
            states[rank] = RankState(rank=rank, pid=pid, pipe=read)
        return states

    def _wait(
        self,
        ranks: dict[int, RankState],
        job: Job,
        on_progress: ProgressCallback | None,
        aborted: Callable[[], bool] | None,
    ) -> None:
        """Until every rank ended, or a grace after the first failure, or the watchdog's time without progress."""
        assert self._control is not None
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, None)
            for state in ranks.values():
                selector.register(state.pipe, selectors.EVENT_READ, state)
            while not all(state.ended for state in ranks.values()):
                for key, _ in selector.select(timeout=0.1):
                    if key.data is None:
                        self._note_exit(ranks)
                    elif not read_pipe(key.data, on_progress):
                        selector.unregister(key.data.pipe)
                now = time.monotonic()
                if deadline is None:
                    if any(state.failed for state in ranks.values()) or (aborted is not None and aborted()):
                        deadline = now + GRACE_S
                    elif all(state.spoke for state in ranks.values()):
                        deadline = now + EXIT_GRACE_S
                    elif now - last_sign_s(ranks) > job.timeout_s + WATCHDOG_MARGIN_S:
                        return
                elif now > deadline:
                    return

    def _note_exit(self, ranks: dict[int, RankState]) -> None:
        event = self._receive()
        state = ranks[event["exited"]]
        state.exit_code, state.exit_signal = event.get("code"), event.get("signal")
        state.exit_s = time.time()

    def _stalled(self, ranks: dict[int, RankState], job: Job) -> dict[int, str]:
        """Where each rank sits that neither spoke nor ended, when the failure is one of no progress."""
        silent = [state for state in ranks.values() if not state.spoke and not state.exited]
        first_error_s = min(
            (state.error_s for state in ranks.values() if state.error), default=time.monotonic()
        )
        if not silent or first_error_s - last_sign_s(ranks) < 0.9 * job.timeout_s:
            return {}
        for state in silent:
            os.kill(state.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return {state.rank: where(state.pid, self.scratch / f"stack.{state.rank}") for state in silent}

    def _end(self, ranks: dict[int, RankState]) -> None:
        """Nothing of the job is left after this, also when Ctrl-C came."""
        for state in ranks.values():
            os.close(state.pipe)
        if self._control is None:
            return
        self._control.send(json.dumps({"op": "end"}).encode())
        while "ended" not in self._receive():
            pass  # exits that were on their way


def read_pipe(state: RankState, on_progress: ProgressCallback | None) -> bool:
    """Take in what a rank wrote; False at the end of its pipe."""
    try:
        chunk = os.read(state.pipe, 1 << 16)
    except BlockingIOError:
        return True
    if not chunk:
        state.open = False
        return False
    *lines, state.buffer = (state.buffer + chunk).split(b"\n")
    for line in lines:
        take_message(state, json.loads(line), on_progress)
    return True


def take_message(state: RankState, message: dict[str, Any], on_progress: ProgressCallback | None) -> None:
    kind, body = message["kind"], message["body"]
    if kind == "progress":
        state.last_sign_s = time.monotonic()
        state.progress = Progress.model_validate(body)
        if on_progress is not None:
            on_progress(state.rank, state.progress)
    elif kind == "report":
        state.report = Report.model_validate(body)
    elif kind == "skipped":
        state.skipped = Skipped.model_validate(body)
    else:
        state.error, state.error_s = RankError.model_validate(body), time.monotonic()


def last_sign_s(ranks: Mapping[int, RankState]) -> float:
    return max(state.last_sign_s for state in ranks.values())


def raised_at_s(state: RankState) -> float:
    return state.error.at_s if state.error is not None else math.inf


def failed_at_s(state: RankState) -> float:
    """When a rank raised or ended without a word, as time.time()."""
    return raised_at_s(state) if state.spoke else state.exit_s


def judge(
    ranks: list[RankState], *, stalled: Mapping[int, str], timeout_s: float, was_oom_killed: bool
) -> Outcome:
    """The outcome and its one line. What ended a rank from outside counts before what its peers said about it."""
    reports = {state.rank: state.report for state in ranks if state.report is not None}
    if len(reports) == len(ranks):
        return Outcome(status="ok", reports=reports)
    skipped = [state.skipped for state in ranks if state.skipped is not None]
    if len(skipped) == len(ranks):
        return Outcome(status="skipped", error=skipped[0].reason)
    errors = sorted((state for state in ranks if state.error is not None), key=raised_at_s)
    memory = [state for state in errors if state.error is not None and state.error.out_of_memory]
    if memory and memory[0].error is not None:
        return Outcome(status="oom", error=_error_line(memory[0]), oom_tier=memory[0].error.out_of_memory)
    killed = [state for state in ranks if state.exit_signal is not None and not state.spoke]
    if killed and was_oom_killed and any(state.exit_signal == signal.SIGKILL for state in killed):
        line = f"{_who(killed)} killed by the kernel's out-of-memory killer (the host's count of such kills rose)"
        return Outcome(status="oom", error=f"{line}: {_when(killed[0])}", oom_tier="host")
    if killed:
        name = signal.Signals(killed[0].exit_signal or 0).name
        return Outcome(status="failed", error=f"{_who(killed)} killed by {name}: {_when(killed[0])}")
    if stalled:
        places = ", ".join(f"rank {rank} in {place}" for rank, place in sorted(stalled.items()))
        line = f"no progress for {timeout_s:g} s (--timeout): {places}"
        return Outcome(status="failed", error=line + (f"; {_error_line(errors[0])}" if errors else ""))
    own = [state for state in errors if state.error is not None and not state.error.communication]
    if own or errors:
        return Outcome(status="failed", error=_error_line((own or errors)[0]), secondary=not own)
    ended = [state for state in ranks if state.exited and not state.spoke]
    if ended:
        return Outcome(
            status="failed",
            error=f"rank {ended[0].rank} ended with exit code {ended[0].exit_code} and no report",
        )
    silent = [state for state in ranks if not state.spoke]
    return Outcome(
        status="failed", error=f"{_who(silent)} stopped after ranks elsewhere failed", secondary=True
    )


def _who(states: Iterable[RankState]) -> str:
    numbers = [str(state.rank) for state in states]
    return f"rank {numbers[0]} was" if len(numbers) == 1 else f"ranks {', '.join(numbers)} were"


def _when(state: RankState) -> str:
    if state.progress is None:
        return "before its first step"
    return f"after step {state.progress.step} of {state.progress.phase}"


def _error_line(state: RankState) -> str:
    assert state.error is not None
    return f"rank {state.rank}: {state.error.type}: {state.error.message}"


def where(pid: int, stack_file: Path) -> str:
    """The innermost Python function of a rank that was sent SIGUSR1 (faulthandler wrote its stack)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        state = ""
    if state in ("T", "t"):
        return "a stop (SIGSTOP)"
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack_file.read_text(errors="replace"))
    if frame is None:
        return "code that runs no Python"
    return f"{frame[3]} ({Path(frame[1]).name}:{frame[2]})"


def oom_kill_num() -> int:
    """How many processes the kernel's out-of-memory killer has killed on this host so far."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def free_ports(num_ports: int) -> list[int]:
    """TCP ports that nobody listens on now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == num_ports:
            return found
    raise Error(f"no {num_ports} free TCP ports among 200 tried from {_PORTS.start} to {_PORTS.stop - 1}")


def meeting_point(address: str) -> dict[str, str]:
    """Where the ranks of a job meet. A port for each pass: a process group made again on the same store can find the
    keys of the one before it and hang."""
    ports = free_ports(NUM_PASSES)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(ports[0]),
        "ZEROBENCH_PORTS": ",".join(map(str, ports)),
        "ZEROBENCH_RENDEZVOUS": uuid.uuid4().hex,
    }


def local_environments(world_size: int) -> list[dict[str, str]]:
    """What the ranks of a job need to meet when all of them are on this host."""
    shared = meeting_point("127.0.0.1")
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # gloo else resolves the host's name, which laptops often cannot
    return [
        {**shared, **rank_environment(rank, world_size, local_rank=rank, local_world_size=world_size)}
        for rank in range(world_size)
    ]


def device_environment(device: str) -> dict[str, str]:
    """What libraries read when they start on a rank: CPU ranks see no GPU, and NVLink multicast stays off."""
    return {"NCCL_NVLS_ENABLE": "0"} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}


def environment_of(job: Job) -> dict[str, str]:
    """A verifying rank's GPU computes the same bits every time."""
    environment = device_environment(job.settings.device)
    if job.verify and job.settings.device == "cuda":
        environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    return environment


def rank_environment(rank: int, world_size: int, *, local_rank: int, local_world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }
