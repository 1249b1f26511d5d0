"""CPU time that other processes than a command's own took of the command's CPUs. Imports no torch.

Own are the command, its descendants, and what the same launcher started. Kernel threads work for whoever asked, so
their time is nobody's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from zerobench.errors import ConfigError
from zerobench.host.launched import find_rank

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTimes(NamedTuple):
    """Seconds since counting began."""

    others_s: float
    own_s: float
    cpu_num: int


class Process(NamedTuple):
    """A line of /proc/PID/stat; times in ticks."""

    parent: int
    start: int  # tells a process from an earlier one with its number
    is_kernel: bool
    cpu: int  # that it ran on last
    used: int
    used_by_children: int  # that ended and were waited for, with theirs


Processes = dict[int, Process]


class CpuUse:
    """Reads /proc. Each ``read`` adds the time since the one before it. A process that ended in between counts as far
    as its parent waited for it."""

    def __init__(
        self, command: int, *, environment: Mapping[str, str] = os.environ, proc: Path = Path("/proc")
    ) -> None:
        self._command = command
        self._launch = launch_of(environment)
        self._is_launched: dict[tuple[int, int], bool] = {}  # by number and start
        self._proc = proc
        self._all, self._own = self._find({})
        self._cpus = allowed_cpus(self._own)
        self._given, _ = self._read_given()
        self._own_ticks = self._kernel_ticks = 0

    def read(self) -> CpuTimes:
        """Return the times up to now."""
        given, cpu_num = self._read_given()
        before, own_before = self._all, self._own
        self._all, self._own = self._find(own_before)
        self._own_ticks += own_ticks(own_before, self._own)
        kernel = {pid: process for pid, process in self._all.items() if process.is_kernel}
        self._kernel_ticks += sum(
            process.used - (_same(before, pid, process) or NOTHING).used
            for pid, process in kernel.items()
            if process.cpu in self._cpus
        )
        others = given - self._given - self._own_ticks - self._kernel_ticks
        return CpuTimes(others / _TICKS_PER_S, self._own_ticks / _TICKS_PER_S, cpu_num)

    def is_own(self, pid: int) -> bool | None:
        """Return whether a process was an own one at the last ``read``, or None where there was no such process."""
        return pid in self._own if pid in self._all else None

    def _read_given(self) -> tuple[int, int]:
        return given_ticks((self._proc / "stat").read_text(), self._cpus)

    def _find(self, own_before: Processes) -> tuple[Processes, Processes]:
        """All processes and the own ones, also those that outlived their parents."""
        found = {}
        for name in os.listdir(self._proc):
            if name.isdecimal():
                with contextlib.suppress(OSError):  # it ended meanwhile
                    found[int(name)] = parse((self._proc / name / "stat").read_bytes())
        roots = [
            pid
            for pid, process in found.items()
            if pid == self._command or _same(own_before, pid, process) or self._of_launch(pid, process)
        ]
        return found, {pid: found[pid] for pid in with_descendants(roots, found)}

    def _of_launch(self, pid: int, process: Process) -> bool:
        if self._launch is None or process.is_kernel:
            return False
        key = (pid, process.start)
        if key not in self._is_launched:
            self._is_launched[key] = launch_of(self._environment_of(pid)) == self._launch
        return self._is_launched[key]

    def _environment_of(self, pid: int) -> dict[str, str]:
        try:
            text = (self._proc / str(pid) / "environ").read_bytes().decode(errors="replace")
        except OSError:  # it ended, or is another user's
            return {}
        return {name: value for name, _, value in (entry.partition("=") for entry in text.split("\0"))}


NOTHING = Process(parent=0, start=0, is_kernel=False, cpu=0, used=0, used_by_children=0)


def launch_of(environment: Mapping[str, str]) -> str | None:
    """Return a text that only what one launcher started shares, or None where no launcher did."""
    try:
        found = find_rank(environment)
    except ConfigError:
        return None
    return found.launcher.meeting_point(environment) if found else None


def allowed_cpus(own: Iterable[int]) -> set[int]:
    """CPUs that any of these processes may use."""
    cpus = set(os.sched_getaffinity(0))
    for pid in own:
        with contextlib.suppress(OSError):
            cpus |= os.sched_getaffinity(pid)
    return cpus


def parse(stat: bytes) -> Process:
    """``stat``: of /proc/PID/stat."""
    fields = stat.rpartition(b")")[2].split()  # from the third of proc(5) on: names may hold blanks
    user, system, child_user, child_system = map(int, fields[11:15])
    return Process(
        parent=int(fields[1]),
        start=int(fields[19]),
        is_kernel=bool(int(fields[6]) & _KERNEL_THREAD),
        cpu=int(fields[36]),
        used=user + system,
        used_by_children=child_user + child_system,
    )


def given_ticks(stat: str, cpus: set[int]) -> tuple[int, int]:
    """Return the ticks in which these CPUs ran processes, and how many CPUs these are. ``stat``: of /proc/stat. Idle
    time, interrupts and time that a hypervisor took are not in it. A container may number its CPUs anew: then all of
    those that it shows count."""
    ticks = {}
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks[int(name[3:])] = sum(map(int, fields[:3]))  # user, nice, system
    counted = cpus & ticks.keys() or ticks.keys()
    return sum(ticks[cpu] for cpu in counted), len(counted)


def with_descendants(roots: Iterable[int], processes: Processes) -> set[int]:
    """Return the numbers of these processes and of all that descend from them."""
    found = set(roots)
    left = {pid: process.parent for pid, process in processes.items() if pid not in found}
    while children := [pid for pid, parent in left.items() if parent in found]:
        found.update(children)
        for pid in children:
            del left[pid]
    return found


def own_ticks(before: Processes, now: Processes) -> int:
    """Return the ticks that own processes used in between, those that ended included. What a process had used before
    it ended is in its parent's count of children, and known from ``before``."""
    counted: dict[int, int] = {}  # by parent: what its children had used that ended since
    for pid, process in before.items():
        if _same(now, pid, process) is None:
            used = process.used + process.used_by_children
            counted[process.parent] = counted.get(process.parent, 0) + used
    ticks = 0
    for pid, process in now.items():
        last = _same(before, pid, process) or NOTHING
        by_children = process.used_by_children - last.used_by_children - counted.get(pid, 0)
        ticks += process.used - last.used + max(by_children, 0)
    return ticks


def _same(processes: Processes, pid: int, process: Process) -> Process | None:
    found = processes.get(pid)
    return found if found is not None and found.start == process.start else None
