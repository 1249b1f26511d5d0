"""Hosts of one machine: network namespaces that a bridge joins, with a link of limited speed each. Imports no torch.

The namespaces have no names. Open files and the processes inside keep them, so they go with the process that made them,
however it ends. docs/explain/networks.md describes the links.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from zerobench.errors import ConfigError
from zerobench.host.network import Link

INTERFACE = "eth0"
"""Name of the link in each namespace."""
_CLONE_NEWNET = 0x40000000
_NAMESPACE = "/proc/thread-self/ns/net"
# Neither a pause between steps, nor a guess of the speed, nor a process that waits for a core may make the link slower
# than it is.
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_wmem": "4096 4194304 4194304",
    "tcp_rmem": "4096 6291456 33554432",
}
_QUEUE_S = 0.05  # how long a packet may wait for its turn before it is dropped
_BURST_S, _LEAST_BURST_BYTES = 0.0005, 69632  # the largest packet of the kernel's goes at once


def address_of(host: int) -> str:
    """Return the address of a host, counted from 0."""
    return f"10.77.{(host + 1) >> 8}.{(host + 1) & 255}"


class ShapedNetwork:
    """Namespaces of ``num`` hosts, by open files. Close it, or use it as a context, once their processes have ended.

    Raises ConfigError, which says what to do, where this machine cannot make them.
    """

    def __init__(self, num: int, link: Link) -> None:
        self._files: list[int] = []
        try:
            _in_a_thread(lambda: self._make(num, link))
        except BaseException:
            self.close()
            raise

    @property
    def namespaces(self) -> Sequence[int]:
        """Return the file descriptor of each host's namespace."""
        return self._files[1:]

    def __enter__(self) -> ShapedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []

    def cut(self, host: int) -> None:
        """Take the link of ``host`` down, as a pulled cable would."""

        def down() -> None:
            enter_namespace(self._files[0])
            _run(["ip", "link", "set", f"port{host}", "down"])

        _in_a_thread(down)

    def _make(self, num: int, link: Link) -> None:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise ConfigError(f"there is no command `{tool}`: install iproute2")
        for _ in range(num):
            self._files.append(_new_namespace())
        self._files.insert(0, _new_namespace())  # the bridge's, in which this thread stays
        own = f"/proc/{os.getpid()}/fd"
        ports = [f"port{host}" for host in range(num)]
        _batch(
            "ip",
            "link add bridge0 type bridge",
            "link set bridge0 up",
            *(
                f"link add {port} type veth peer name {INTERFACE} netns {own}/{namespace}"
                for port, namespace in zip(ports, self.namespaces, strict=True)
            ),
            *(f"link set {port} master bridge0 up" for port in ports),
        )
        _batch("tc", *(f"qdisc add dev {port} {_shape(link, is_delayed=True)}" for port in ports))
        for host, namespace in enumerate(self.namespaces):
            enter_namespace(namespace)
            _batch(
                "ip",
                "link set lo up",
                f"address add {address_of(host)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} addrgenmode none up",  # or libraries may take an IPv6 address of the link
            )
            _batch("tc", f"qdisc add dev {INTERFACE} {_shape(link, is_delayed=False)}")
            for name, value in _TCP.items():
                Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def why_not_shaped(link: Link) -> str | None:
    """Return why this machine cannot make hosts that ``link`` connects, and what to do; None where it can."""
    try:
        ShapedNetwork(2, link).close()
    except ConfigError as error:
        return str(error)
    return None


def enter_namespace(file: int) -> None:
    """Move the calling thread, and the processes that it starts, into a network namespace."""
    _call(lambda libc: libc.setns(file, _CLONE_NEWNET))


def _new_namespace() -> int:
    _call(lambda libc: libc.unshare(_CLONE_NEWNET))
    return os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)


def _call(function: Callable[[ctypes.CDLL], int]) -> None:
    if function(ctypes.CDLL(None, use_errno=True)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"this process may not make network namespaces ({reason}): run as root, or in `unshare --user "
            "--map-root-user`, or in a container with the capabilities SYS_ADMIN and NET_ADMIN"
        )


def _shape(link: Link, *, is_delayed: bool) -> str:
    """Return a queue that sends at the link's speed; of one that also delays, the other end limits the speed."""
    if is_delayed and link.latency_s:
        return f"root netem delay {link.latency_s * 1e6:.0f}us limit 100000"
    burst_bytes = max(_LEAST_BURST_BYTES, round(link.bits_per_s / 8 * _BURST_S))
    return f"root tbf rate {link.bits_per_s:.0f}bit burst {burst_bytes} latency {_QUEUE_S * 1e3:.0f}ms"


def _batch(tool: str, *lines: str) -> None:
    _run([tool, "-batch", "-"], "\n".join(lines))


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[0].removeprefix("Error: ")
        if "netem" in text:
            raise ConfigError(
                f"a latency needs netem, which this kernel lacks ({reason}): remove the latency, or load the "
                "module sch_netem"
            )
        raise ConfigError(
            f"`{' '.join(command)}` failed ({reason}): this needs the capability NET_ADMIN and the kernel's modules "
            "bridge, veth and sch_tbf"
        )


def _in_a_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of its own, since a thread does not come back from a namespace that it enters."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="zerobench-network")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
