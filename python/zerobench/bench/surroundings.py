"""Facts that a comparison knows of its host, read once and passed in as a value. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerobench.bench.disk_notes import why_not_lockable
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.options import CompareOptions
from zerobench.host.machine import machine_facts, memory_available_bytes, typed_command, version_facts
from zerobench.host.storage import lockable_bytes


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Facts from before anything of the comparison runs, and what is asked again before each row."""

    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    memory_available_bytes: Callable[[], int]
    why_not_lockable: Callable[[Configuration], str | None] = lambda _: None


def read_surroundings(options: CompareOptions) -> Surroundings:
    def why_a_row_is_not_lockable(configuration: Configuration) -> str | None:
        return why_not_lockable(configuration, lockable_bytes=lockable_bytes(), host_ranks=options.host_ranks)

    return Surroundings(
        machine=machine_facts(options.gpus),
        versions=version_facts(gpus=bool(options.gpus)),
        command=shlex.join(typed_command()),
        memory_available_bytes=memory_available_bytes,
        why_not_lockable=why_a_row_is_not_lockable,
    )
