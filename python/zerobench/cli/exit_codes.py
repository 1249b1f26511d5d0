"""The exit codes of every command. Imports no torch."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that scripts may rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REGRESSION = 3
    HANGUP = 128 + signal.SIGHUP
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


MEANINGS = {
    ExitCode.OK: "The command did what was asked. What it found is good, as far as the command judges.",
    ExitCode.FAILED: "The command ran, and what it found is not good (see below), or something failed on the way.",
    ExitCode.USAGE: "The command cannot start as given: an option, a name, a file or a combination of them is wrong.",
    ExitCode.REGRESSION: "Of `diff` alone: a row broke, or it is worse by more than `--fail-above`.",
    ExitCode.HANGUP: "SIGHUP ended the command: its terminal was closed.",
    ExitCode.INTERRUPTED: "Ctrl-C (SIGINT) ended the command. `compare` and `recipe run` keep the rows so far.",
    ExitCode.TERMINATED: "SIGTERM ended the command, as `kill` and schedulers send it.",
}

FAILED_FINDING = {
    "compare": "A row is wrong or failed, or no row is ok.",
    "recipe run": "A row is wrong or failed, or no row is ok.",
    "doctor": "There is an error or a warning among the findings.",
    "launch": "With `--ssh`: a host cannot be reached, or its line failed.",
    "bench comm": "A result is wrong, or a rank failed.",
    "bench adam": "A result differs from the scalar form.",
    "bench io": "A transfer failed.",
    "tune io": "A transfer failed.",
}
"""What exit code 1 of a command says beyond a failure on the way, such as a disk that is full."""
