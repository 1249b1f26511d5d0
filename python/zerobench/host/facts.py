"""Facts about this process's host, read once where an engine begins and handed down as values. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerobench.host.cgroups import cpu_quota
from zerobench.host.identity import boot_id, host_identity
from zerobench.host.numa import SYSFS


@dataclass(frozen=True)
class HostFacts:
    """What a host gives one process."""

    environment: Mapping[str, str]
    cpus: tuple[int, ...]  # that the process may run on, in order
    cpu_quota: float | None  # cores' worth of time that control groups allow; None where none sets a limit
    name: str  # with the kernel's boot: equal on processes that divide the same CPUs
    identity: str  # equal on processes that can connect by shared memory
    sysfs: Path  # the kernel's folder of NUMA nodes, cores and devices


def read_host_facts() -> HostFacts:
    """Return the facts of the real host."""
    return HostFacts(
        environment=os.environ,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        cpu_quota=cpu_quota(),
        name=f"{platform.node()} {boot_id()}",
        identity=host_identity(),
        sysfs=SYSFS,
    )
