"""Checks of options that several micro-benchmarks have. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Sequence

from zerobench.errors import ConfigError
from zerobench.host.machine import cpus_usable


def check_repeats(repeats: int) -> None:
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats} measures nothing: give at least 1")


def check_threads(thread_num: int) -> None:
    if not 1 <= thread_num <= cpus_usable():
        raise ConfigError(
            f"--threads {thread_num} is not valid: give 1 to {cpus_usable()}, the cores usable here"
        )


def check_known(option: str, values: Sequence[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise ConfigError(f"{option} {value!r} is unknown: choose from {', '.join(known)}")
