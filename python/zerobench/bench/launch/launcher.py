"""Runs a job in fresh processes and tells what became of it. Imports no torch.

Ranks are forked by a fork server (forkserver.py) and answer over a socket each, in JSON lines: progress, then a report,
an error or the reason to be skipped. Ranks that take turns read orders from it (seat.py). Logs are for people and are
never parsed. A job always ends: with every report, or a grace after the first failure, or when no rank has made
progress for the timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerobench.bench.launch.environments import environment_of, environments_of, namespaces_of
from zerobench.bench.launch.outcome import Outcome, failed_at_s, judge, oom_kill_num
from zerobench.bench.launch.ranks import ProgressCallback, RankState, last_sign_s, read_pipe, where
from zerobench.bench.launch.seat import Seat
from zerobench.bench.protocol.job import Job
from zerobench.bench.protocol.messages import MESSAGE_LIMIT_BYTES
from zerobench.errors import ConfigError, Error
from zerobench.host.locked_folder import LockedFolder
from zerobench.host.processes import child_environment
from zerobench.results.files import cannot_be_written

GRACE_S = 5.0  # what the other ranks get to notice a failure and say so
WATCHDOG_MARGIN_S = 3.0  # communicators, which can name the rank at fault, come first
EXIT_GRACE_S = 15.0
SERVER_START_S = 120.0
ANSWER_S = 60.0  # of the server, also to kill and reap a whole job
_WAITING_S = (
    5.0  # how seldom the thread of a job looks up while its ranks wait, so that it takes no time of others
)


class ServerGone(Error):
    """The fork server ended, or does not answer; another one starts when it is needed."""


class Launcher:
    """Owns the fork server, which starts with the first job. Close it, or use it as a context."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        try:
            self._scratch = LockedFolder(tempfile.gettempdir(), prefix="zerobench-launch-")
            self._scratch.path.encode()  # torch takes no other names
        except (OSError, UnicodeEncodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "its name is not UTF-8 text"
            raise ConfigError(
                f"temporary files cannot be created ({reason}): free some space, or name another folder by TMPDIR"
            ) from None

    @property
    def scratch(self) -> Path:
        """A folder of this launcher's own, removed by close(), or by the next launcher where this one was killed."""
        return Path(self._scratch.path)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop_server()
        self._scratch.close()

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

    def request_sibling(self, control: socket.socket) -> None:
        """Have the server fork a server for the other end of ``control``; no job of this launcher may run."""
        self._connect()
        self._send({"op": "sibling"}, [control.fileno()])

    def _connect(self) -> socket.socket:
        """The socket of a running server; starts one when there is none."""
        if self._control is not None and self._server is not None and self._server.poll() is None:
            return self._control
        self._stop_server()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **child_environment(),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch may ask for GPUs without initialising CUDA before a fork
        }
        with theirs, self._server_log.open("wb") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "zerobench.bench.launch.forkserver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the command only, which then ends the ranks
            )
        ours.settimeout(SERVER_START_S)
        self._control = ours
        try:
            message = self._receive()
        except KeyboardInterrupt:
            self._server.terminate()  # which looks at its socket only once torch is imported
            raise
        if "ready" not in message:
            raise Error("the fork server did not say that it is ready: this is a bug of zerobench")
        return ours

    @property
    def _server_log(self) -> Path:
        return self.scratch / "forkserver.stderr"

    def _receive(self) -> dict[str, Any]:
        """The server's next message."""
        assert self._control is not None
        try:
            message = self._control.recv(MESSAGE_LIMIT_BYTES)
        except (TimeoutError, ConnectionError):
            message = b""
        if not message:
            raise self._gone()
        return json.loads(message)

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except (TimeoutError, ConnectionError):
            raise self._gone() from None

    def _gone(self) -> ServerGone:
        text = self._server_log.read_text(errors="replace").strip()
        last = text.splitlines()[-1] if text else "it wrote nothing"
        self._stop_server()
        return ServerGone(f"the process that starts the ranks ended or does not answer ({last})")

    def run(
        self,
        job: Job,
        *,
        log: Path,
        on_progress: ProgressCallback | None = None,
        environments: Sequence[Mapping[str, str]] | None = None,
        aborted: Callable[[], bool] | None = None,
        seat: Seat | None = None,
    ) -> Outcome:
        """Run ``job`` and wait for its end. By default all its ranks are this machine's; under torchrun or srun this
        launcher starts only the ranks that ``environments`` describe, and ``aborted`` tells that others' failed.
        ``seat`` is where a job that takes turns gets its orders: time that it waits for them counts for no timeout.

        Raises Error where the folder of temporary files has gone, in which the ranks find nothing either."""
        try:
            with namespaces_of(job) as namespaces:
                outcome = self._run(
                    job, log, on_progress, environments or environments_of(job), namespaces, aborted, seat
                )
        except FileNotFoundError:
            self.expect_scratch()
            raise
        if outcome.status == "failed":
            self.expect_scratch()
        return outcome

    def expect_scratch(self) -> None:
        """Raise Error where the folder of temporary files has gone."""
        if not self.scratch.is_dir():
            raise Error(
                f"the folder of temporary files, {self.scratch}, was removed while it was in use: keep it until the "
                "command ends, or name another place by TMPDIR"
            ) from None

    def _run(
        self,
        job: Job,
        log: Path,
        on_progress: ProgressCallback | None,
        environments: Sequence[Mapping[str, str]],
        namespaces: Sequence[int],
        aborted: Callable[[], bool] | None,
        seat: Seat | None,
    ) -> Outcome:
        for environment in environments:
            (self.scratch / f"stack.{environment['RANK']}").write_bytes(b"")
        kills_before = oom_kill_num()
        try:
            ranks = self._fork(job, environments, namespaces, log)
        except ServerGone:  # before it said that a rank runs: what it forked dies with it
            ranks = self._fork(job, environments, namespaces, log)
        if seat is not None:
            seat.open({state.rank: state.pipe for state in ranks.values()})
        try:
            self._wait(ranks, job, on_progress, aborted, seat)
            stalled = self._stalled(ranks, job, seat)
        except ServerGone as error:
            return Outcome(status="failed", error=str(error), failed_at_s=time.time())
        finally:
            if seat is not None:
                seat.close()
            self._end(ranks)
        was_oom_killed = oom_kill_num() > kills_before
        outcome = judge(
            list(ranks.values()),
            stalled=stalled,
            timeout_s=job.timeout_s,
            was_oom_killed=was_oom_killed,
            rank_memory_bytes=job.rank_memory_bytes,
        )
        return replace(outcome, failed_at_s=min(map(failed_at_s, ranks.values())))

    def _fork(
        self, job: Job, environments: Sequence[Mapping[str, str]], namespaces: Sequence[int], log: Path
    ) -> dict[int, RankState]:
        control = self._connect()
        request = {
            "op": "fork",
            "environments": [{**environment_of(job), **environment} for environment in environments],
            "job": {**job.model_dump(mode="json"), "scratch": str(self.scratch)},
            "memory_limit_bytes": job.rank_memory_bytes,
        }
        try:
            log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_be_written(log, error) from None
        pairs = [socket.socketpair() for _ in environments]
        try:
            control.settimeout(ANSWER_S)
            self._send(request, [log_fd, *(theirs.fileno() for _, theirs in pairs), *namespaces])
            pids = self._receive()["pids"]
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            os.close(log_fd)
            for _, theirs in pairs:
                theirs.close()
        states = {}
        for environment, (ours, _), pid in zip(environments, pairs, pids, strict=True):
            ours.setblocking(False)
            rank = int(environment["RANK"])
            states[rank] = RankState(rank=rank, pid=pid, pipe=ours.detach())
        return states

    def _wait(
        self,
        ranks: dict[int, RankState],
        job: Job,
        on_progress: ProgressCallback | None,
        aborted: Callable[[], bool] | None,
        seat: Seat | None,
    ) -> None:
        """Until every rank ended, or a grace after the first failure, or the watchdog's time without progress."""
        assert self._control is not None
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, None)
            for state in ranks.values():
                selector.register(state.pipe, selectors.EVENT_READ, state)
            while not all(state.ended for state in ranks.values()):
                is_waiting = seat is not None and seat.is_waiting and deadline is None
                for key, _ in selector.select(timeout=_WAITING_S if is_waiting else 0.1):
                    if key.data is None:
                        self._note_exit(ranks)
                    elif not read_pipe(key.data, on_progress, seat.answer if seat is not None else None):
                        selector.unregister(key.data.pipe)
                now = time.monotonic()
                if deadline is None:
                    if any(state.failed for state in ranks.values()) or (aborted is not None and aborted()):
                        deadline = now + GRACE_S
                    elif all(state.spoke for state in ranks.values()):
                        deadline = now + EXIT_GRACE_S
                    elif now - busy_since_s(ranks, seat) > job.timeout_s + WATCHDOG_MARGIN_S:
                        return
                elif now > deadline:
                    return

    def _note_exit(self, ranks: dict[int, RankState]) -> None:
        event = self._receive()
        state = ranks[event["exited"]]
        state.exit_code, state.exit_signal = event.get("code"), event.get("signal")
        state.exit_s = time.time()

    def _stalled(self, ranks: dict[int, RankState], job: Job, seat: Seat | None) -> dict[int, str]:
        """Return where in the code each rank waits that neither sent anything nor ended; empty unless the failure is a
        lack of progress."""
        silent = [state for state in ranks.values() if not state.spoke and not state.exited]
        first_error_s = min(
            (state.error_s for state in ranks.values() if state.error), default=time.monotonic()
        )
        if not silent or first_error_s - busy_since_s(ranks, seat) < 0.9 * job.timeout_s:
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
        with contextlib.suppress(ServerGone):  # and its ranks with it
            self._send({"op": "end"})
            while "ended" not in self._receive():
                pass  # exits that were on their way


def busy_since_s(ranks: Mapping[int, RankState], seat: Seat | None) -> float:
    """Return from when on no progress counts: the last sign of a rank or the last order, or now where all wait."""
    if seat is None:
        return last_sign_s(ranks)
    return time.monotonic() if seat.is_waiting else max(last_sign_s(ranks), seat.ordered_s)
