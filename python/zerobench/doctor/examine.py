"""All examinations of a machine, in the order in which their findings are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zerobench.doctor.finding import Facts, Finding, Level
from zerobench.doctor.gpu_findings import (
    cuda_module_loads,
    gpus_are_usable,
    gpus_run_free,
    links_are_whole,
    versions_agree,
)
from zerobench.doctor.host_findings import (
    cores_suffice,
    disks_are_fast,
    environment_is_clean,
    memory_is_free,
    network_is_ready,
)

EXAMINATIONS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    gpus_are_usable,
    cuda_module_loads,
    versions_agree,
    links_are_whole,
    gpus_run_free,
    cores_suffice,
    memory_is_free,
    disks_are_fast,
    network_is_ready,
    environment_is_clean,
)


def examine(facts: Facts) -> list[Finding]:
    """Return the findings, errors first, then in the order of EXAMINATIONS."""
    found = [finding for examination in EXAMINATIONS for finding in examination(facts)]
    levels: Sequence[Level] = ("error", "warning", "note")
    return sorted(found, key=lambda finding: levels.index(finding.level))
