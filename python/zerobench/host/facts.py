"""Facts about this process's host, read once where an engine begins and handed down as values. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerobench.host.cgroups import cpu_quota
from zerobench.host.identity import HOST_VARIABLE, host_identity, machine_identity
from zerobench.host.numa import SYSFS


@dataclass(frozen=True)
class HostFacts:
    """Facts about the host of one process."""

    environment: Mapping[str, str]
    cpus: tuple[int, ...]  # that the process may run on, in order
    cpu_quota: float | None  # cores' worth of time that control groups allow; None where none sets a limit
    machine: str  # equal on processes that divide the same CPUs
    identity: str  # equal on processes that can connect by shared memory
    sysfs: Path  # the kernel's folder of NUMA nodes, cores and devices


def read_host_facts() -> HostFacts:
    """Return the facts of the real host."""
    quota = cpu_quota()
    return HostFacts(
        environment=os.environ,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpu_quota=quota,
        machine=machine_identity(has_quota=quota is not None),
        identity=host_identity(name=os.environ.get(HOST_VARIABLE, "")),
        sysfs=SYSFS,
    )
