"""A process that imported torch and what ranks do once, and forks fresh ranks from that.

It only imports, neither the native core nor a user's own modules, and runs no tensor operation: a child forked after
one OpenMP region hangs. Ranks set their own threads and load everything else themselves. One job at a time; the command
and this server talk JSON over a SOCK_SEQPACKET socket. Ranks live in one process group that is killed when their job
ends, and both the server and the ranks die with their parent, so nothing outlives the command, however it ends.

A server forks siblings of itself on request: each is a server with a socket and a job of its own, so that jobs can be
alive at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from zerobench._native import import_torch
from zerobench.bench.launch.swap_files import remove_left
from zerobench.bench.protocol.messages import FD_LIMIT, MESSAGE_LIMIT_BYTES, send
from zerobench.host.processes import die_with_parent, name_process, vm_data_bytes
from zerobench.host.shaped_network import enter_namespace

# Imported by every strategy's first optimizer step; plain Python, and a second for each rank if not done here.
_TORCH_MODULES = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
_RANK_MODULE = "zerobench.bench.rank.worker"  # another half of a second


class ForkServer:
    """State of the server process: its socket and the ranks of the job that runs."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.ranks: dict[int, int] = {}  # pid: rank
        self.siblings: set[int] = set()  # pids
        self.group: int | None = None  # the process group, kept alive by its unreaped leader
        self.job_pids: list[int] = []
        self.swap_paths: list[str] = []  # of the job
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides what Ctrl-C ends
        signal.signal(signal.SIGTERM, lambda *_: self.shut_down())
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        self.control.send(json.dumps({"ready": os.getpid()}).encode())
        sources: list[Any] = [self.control, self.wake_read]
        while True:
            readable, _, _ = select.select(sources, [], [])
            if self.wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
                self.report_exits()
            if self.control in readable:
                message, fds, _, _ = socket.recv_fds(self.control, MESSAGE_LIMIT_BYTES, FD_LIMIT)
                if not message:
                    self.shut_down()
                self.handle(json.loads(message), fds)

    def handle(self, request: dict[str, Any], fds: list[int]) -> None:
        if request["op"] == "fork":
            self.fork(request, fds)
        elif request["op"] == "end":
            self.end()
            self.control.send(json.dumps({"ended": True}).encode())
        elif request["op"] == "sibling":
            self.fork_sibling(*fds)
        else:
            raise ValueError(f"unknown request {request['op']!r}")

    def fork(self, request: dict[str, Any], fds: list[int]) -> None:
        ranks = request["environments"]
        log, reports, namespaces = fds[0], fds[1 : 1 + len(ranks)], fds[1 + len(ranks) :]
        sys.stdout.flush()
        sys.stderr.flush()
        server, pids = os.getpid(), []
        for environment, report, namespace in itertools.zip_longest(ranks, reports, namespaces):
            pid = os.fork()
            if pid == 0:
                place = ChildPlace(self.group or 0, server, log, report, namespace)
                run_child(request, environment, place)
            with contextlib.suppress(OSError):  # the child does the same; whoever comes first
                os.setpgid(pid, self.group or pid)
            self.group = self.group or pid
            self.ranks[pid] = int(environment["RANK"])
            pids.append(pid)
        self.job_pids, self.swap_paths = pids, request["job"]["settings"]["nvme_paths"]
        for fd in fds:
            os.close(fd)
        self.control.send(json.dumps({"pids": pids}).encode())

    def fork_sibling(self, control_fd: int) -> None:
        """Fork a server for the socket ``control_fd``, which says itself that it is ready."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            run_sibling(control_fd, server=server)
        self.siblings.add(pid)
        os.close(control_fd)

    def report_exits(self) -> None:
        for pid in list(self.siblings):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.siblings.remove(pid)
        for pid in list(self.ranks):
            # Not reaped before the job's end: the leader's zombie keeps the process group's id from being reused.
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                continue
            killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            event = {"exited": self.ranks.pop(pid), "signal" if killed else "code": info.si_status}
            self.control.send(json.dumps(event).encode())

    def end(self) -> None:
        """Kill what is left of the job's process group, reap it, and remove swap files that it left."""
        if self.group is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self.group, 0)
        for path in dict.fromkeys(self.swap_paths):
            remove_left(path, pids=self.job_pids)
        self.ranks.clear()
        self.group = None

    def shut_down(self) -> None:
        self.end()
        os._exit(0)


def run_sibling(control_fd: int, *, server: int) -> None:
    """Serve as another fork server in a forked child; never return."""
    try:
        signal.set_wakeup_fd(-1)
        die_with_parent(signal.SIGTERM)
        if os.getppid() != server:
            os._exit(1)
        control_fd = os.dup2(control_fd, 3, inheritable=False)
        os.closerange(4, 1 << 16)  # the other server's own socket and pipes
        ForkServer(socket.socket(fileno=control_fd)).serve()
    finally:
        os._exit(1)


class ChildPlace(NamedTuple):
    """Process group and files of a forked rank."""

    group: int
    server: int
    log: int
    report: int
    namespace: int | None  # of its network; None where it stays in the server's


def run_child(request: dict[str, Any], environment: dict[str, str], place: ChildPlace) -> None:
    """A forked rank: never returns."""
    code, report = 1, place.report
    limit_bytes: int | None = request["memory_limit_bytes"]
    try:
        os.setpgid(0, place.group)
        die_with_parent(signal.SIGKILL)
        name_process(f"zerobench-r{environment['RANK']}")
        if os.getppid() != place.server:
            os._exit(1)
        if place.namespace is not None:
            enter_namespace(place.namespace)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (place.log, 1), (place.log, 2)):
            os.dup2(source, target)
        report = os.dup2(report, 3, inheritable=False)
        os.closerange(4, 1 << 16)  # the server's own socket and pipes
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.update(environment)
        if limit_bytes is not None:
            limit = vm_data_bytes() + limit_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        from zerobench.bench.rank.worker import run_rank

        code = run_rank(request["job"], report_fd=report)
        sys.stdout.flush()
    except BaseException as error:
        tell(error, report_fd=report, is_limited=limit_bytes is not None)
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def tell(error: BaseException, *, report_fd: int, is_limited: bool) -> None:
    """Send the error that ended a rank before the rank could send it by its own means (channel.py)."""
    lines = str(error).strip().splitlines() or ["no message"]
    if isinstance(error, MemoryError):
        lines = [f"there is too little memory to start a rank{' in --rank-memory-gib' if is_limited else ''}"]
    body = {  # a RankError (job.py)
        "type": type(error).__name__,
        "message": lines[0],
        "phase": "start",
        "out_of_memory": "host" if isinstance(error, MemoryError) else None,
        "at_s": time.time(),
    }
    with contextlib.suppress(OSError):  # where the command has gone
        send(report_fd, "error", body)


def main() -> None:
    die_with_parent(signal.SIGTERM)
    control = socket.socket(fileno=int(sys.argv[1]))
    import_torch()
    for name in (*_TORCH_MODULES, _RANK_MODULE):
        importlib.import_module(name)
    if sys.modules["torch"].cuda.is_initialized():
        sys.exit(
            "importing torch or zerobench initialised CUDA, so no rank that is forked from here could use a GPU"
        )
    gc.freeze()  # a rank's collector would write to every page that it shares with this process
    ForkServer(control).serve()


if __name__ == "__main__":
    main()
