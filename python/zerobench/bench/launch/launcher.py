"""Runs a job in fresh processes and tells what became of it. Imports no torch.

Ranks are forked by a fork server (forkserver.py) and answer over a pipe each, in JSON lines: progress, then a report,
an error or the reason to be skipped. Logs are for people and are never parsed. A job always ends: with every report,
or a grace after the first failure, or when no rank has made progress for the timeout.
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

from zerobench.bench.launch.environments import environment_of, local_environments
from zerobench.bench.launch.outcome import Outcome, failed_at_s, judge, oom_kill_num
from zerobench.bench.launch.ranks import ProgressCallback, RankState, last_sign_s, read_pipe, where
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
            reason = error.strerror if isinstance(error, OSError) else "its name is no text in UTF-8"
            raise ConfigError(
                f"there is no place for temporary files ({reason}): free some space, or name another folder by TMPDIR"
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

    def _connect(self) -> socket.socket:
        """The socket of a running server; starts one when there is none."""
        if self._control is not None and self._server is not None and self._server.poll() is None:
            return self._control
        self._stop_server()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stderr_path = self.scratch / "forkserver.stderr"
        environment = {
            **child_environment(),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch may ask for GPUs without initialising CUDA before a fork
        }
        with theirs, stderr_path.open("wb") as stderr:
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

    def _receive(self) -> dict[str, Any]:
        """The server's next message."""
        assert self._control is not None and self._server is not None
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
        text = (self.scratch / "forkserver.stderr").read_text(errors="replace").strip()
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
    ) -> Outcome:
        """Run ``job`` and wait for its end. By default all its ranks are this host's; under torchrun or srun this
        launcher starts only the ranks that ``environments`` describe, and ``aborted`` tells that others' failed.

        Raises Error where the folder of temporary files has gone, in which the ranks find nothing either."""
        try:
            outcome = self._run(
                job, log, on_progress, environments or local_environments(job.num_ranks), aborted
            )
        except FileNotFoundError:
            self._expect_scratch()
            raise
        if outcome.status == "failed":
            self._expect_scratch()
        return outcome

    def _expect_scratch(self) -> None:
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
        aborted: Callable[[], bool] | None,
    ) -> Outcome:
        for environment in environments:
            (self.scratch / f"stack.{environment['RANK']}").write_bytes(b"")
        kills_before = oom_kill_num()
        try:
            ranks = self._fork(job, environments, log)
        except ServerGone:  # before it said that a rank runs: what it forked dies with it
            ranks = self._fork(job, environments, log)
        try:
            self._wait(ranks, job, on_progress, aborted)
            stalled = self._stalled(ranks, job)
        except ServerGone as error:
            return Outcome(status="failed", error=str(error), failed_at_s=time.time())
        finally:
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

    def _fork(self, job: Job, environments: Sequence[Mapping[str, str]], log: Path) -> dict[int, RankState]:
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
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in environments]
        try:
            control.settimeout(ANSWER_S)
            self._send(request, [log_fd, *(write for _, write in pipes)])
            pids = self._receive()["pids"]
        except BaseException:
            for read, _ in pipes:
                os.close(read)
            raise
        finally:
            for fd in (log_fd, *(write for _, write in pipes)):
                os.close(fd)
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
        with contextlib.suppress(ServerGone):  # and its ranks with it
            self._send({"op": "end"})
            while "ended" not in self._receive():
                pass  # exits that were on their way
