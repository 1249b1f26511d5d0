"""A launcher whose fork server was forked by another launcher's. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path

from zerobench.bench.launch.launcher import SERVER_START_S, Launcher, ServerGone
from zerobench.bench.protocol.messages import MESSAGE_LIMIT_BYTES
from zerobench.errors import Error

_END_S = 10.0  # in which the server kills and reaps what runs


class SiblingLauncher(Launcher):
    """Runs jobs while other launchers run theirs. Its server starts at once, since it needs no imports."""

    def __init__(self, first: Launcher) -> None:
        self._first = first
        self._server = None
        self._control = None
        self._pid = 0
        self._is_aborted = False
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="sibling-", dir=first.scratch))
        except OSError as error:
            first.expect_scratch()
            raise Error(
                f"temporary files cannot be created in {first.scratch} ({error.strerror}): free some space, or "
                "name another folder by TMPDIR"
            ) from None

    @property
    def scratch(self) -> Path:
        return self._folder

    @property
    def _server_log(self) -> Path:
        return self._first.scratch / "forkserver.stderr"

    def abort(self) -> None:
        """End the job that runs, from any thread: its ``run`` returns soon, and no other one starts."""
        self._is_aborted = True
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the server and its ranks, where it does not end them itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self._stop_server()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self) -> socket.socket:
        if self._control is not None:
            return self._control
        if self._is_aborted:
            raise ServerGone("the job was ended")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(SERVER_START_S)
        with theirs:
            self._first.request_sibling(theirs)
        self._control = ours
        self._pid = self._receive()["ready"]
        return ours

    def _stop_server(self) -> None:
        control, self._control = self._control, None
        if control is None:
            return
        with control:
            try:
                control.shutdown(socket.SHUT_WR)
                control.settimeout(_END_S)
                while control.recv(MESSAGE_LIMIT_BYTES):
                    pass
            except TimeoutError:
                self.kill()
            except OSError:
                pass  # it has ended
