"""Start a line on each host over ssh, show what all of them print, and end all of them when one ends with an error."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerobench.errors import Error
from zerobench.hosts.hostfile import Host

_NOT_REACHED = 255  # ssh's own exit code; programs are asked not to use it
_GRACE_S = 10.0  # from SIGTERM to SIGKILL


@dataclass
class _Remote:
    host: Host
    process: subprocess.Popen[bytes]
    rest: bytes = b""  # of a line that has not ended
    last: str = ""  # line that it printed
    is_open: bool = True


def run_over_ssh(
    hosts: Sequence[Host],
    lines: Sequence[str],
    *,
    show: Callable[[str], None],
    ssh: Sequence[str] = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    folder: Path | None = None,
) -> None:
    """Run ``lines[i]`` on ``hosts[i]`` in ``folder`` (default: the current one) and wait for all. ``show`` takes each
    line of output with the host's name in front.

    A remote line has a terminal (``-tt``), so it ends when its ssh does. Raises Error that names the first host that
    cannot be reached or whose line fails, once the others have ended.
    """
    remotes: list[_Remote] = []
    place = shlex.quote(str(folder or Path.cwd()))
    try:
        for host, line in zip(hosts, lines, strict=True):
            words = [*ssh, host.name, f"cd {place} && exec {line}"]
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches this command alone, which then ends them
                )  # fmt: skip
            except OSError as error:
                raise Error(
                    f"{words[0]} cannot be started ({error.strerror}): install an ssh client"
                ) from None
            remotes.append(_Remote(host, process))
        failed = _wait(remotes, show)
    finally:
        _end(remotes)
    if failed is not None:
        raise Error(_reason(failed))


def _wait(remotes: Sequence[_Remote], show: Callable[[str], None]) -> _Remote | None:
    """Show output until all have ended well; return the first that did not."""
    with selectors.DefaultSelector() as selector:
        for remote in remotes:
            assert remote.process.stdout is not None
            os.set_blocking(remote.process.stdout.fileno(), False)
            selector.register(remote.process.stdout, selectors.EVENT_READ, remote)
        while any(remote.is_open for remote in remotes):
            for key, _ in selector.select(timeout=0.2):
                if not _take_output(key.data, show):
                    selector.unregister(key.fileobj)
            for remote in remotes:
                if remote.process.poll() not in (None, 0):
                    while remote.is_open and _take_output(remote, show):
                        pass
                    return remote
    for remote in remotes:
        if remote.process.wait() != 0:
            return remote
    return None


def _take_output(remote: _Remote, show: Callable[[str], None]) -> bool:
    """Show whole lines; False at the end."""
    assert remote.process.stdout is not None
    try:
        chunk = os.read(remote.process.stdout.fileno(), 1 << 16)
    except BlockingIOError:
        return remote.process.poll() is None
    if not chunk:
        remote.is_open = False
    *lines, remote.rest = (remote.rest + chunk).split(b"\n")
    if not chunk and remote.rest:
        lines, remote.rest = [*lines, remote.rest], b""
    for line in lines:
        remote.last = line.decode(errors="replace").rstrip("\r")
        show(f"{remote.host.name}: {remote.last}")
    return bool(chunk)


def _end(remotes: Sequence[_Remote]) -> None:
    """Leave no ssh behind, and with it nothing on the hosts."""
    for remote in remotes:
        if remote.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(remote.process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    for remote in remotes:
        try:
            remote.process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(remote.process.pid, signal.SIGKILL)
            remote.process.wait()
        if remote.process.stdout is not None:
            remote.process.stdout.close()


def _reason(remote: _Remote) -> str:
    code = remote.process.returncode
    if code == _NOT_REACHED:
        return (
            f"host {remote.host.name} cannot be reached by ssh ({remote.last or 'it printed nothing'}): check its "
            "name, and that ssh logs in there without a question"
        )
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"host {remote.host.name}: the command {how} ({remote.last or 'it printed nothing'}); all hosts were ended"
