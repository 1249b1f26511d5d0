"""The torchrun line of each host."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from zerobench.errors import ConfigError
from zerobench.hosts.hostfile import Host


def program_words(command: Sequence[str]) -> list[str]:
    """Return how torchrun names the program of a command line: a script, ``-m module``, or any program."""
    words = list(command)
    if not words:
        raise ConfigError("no command follows: give one after --, as in `-- python train.py`")
    name = PurePosixPath(words[0]).name
    if name.startswith("python") and len(words) > 1:
        if words[1] == "-m" and len(words) > 2:
            return words[1:]
        if not words[1].startswith("-"):
            return words[1:]
        raise ConfigError(
            f"python {words[1]} cannot be started by torchrun: give a script or -m and a module"
        )
    if name == "zerobench":
        return ["-m", *words]
    return words if name.endswith(".py") else ["--no-python", *words]


def torchrun_words(hosts: Sequence[Host], index: int, command: Sequence[str], *, port: int) -> list[str]:
    """Return the words that start the ranks of host ``index``; all hosts meet at the first one."""
    return [
        "torchrun",
        f"--nnodes={len(hosts)}",
        f"--node-rank={index}",
        f"--nproc-per-node={hosts[index].slots}",
        f"--master-addr={hosts[0].address}",
        f"--master-port={port}",
        *program_words(command),
    ]


def torchrun_lines(hosts: Sequence[Host], command: Sequence[str], *, port: int) -> list[str]:
    """Return a line for each host, in the order of ``hosts``."""
    return [shlex.join(torchrun_words(hosts, index, command, port=port)) for index in range(len(hosts))]
