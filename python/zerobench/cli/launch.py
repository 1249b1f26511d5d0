"""`zerobench launch`: lines to copy, lines over ssh, or a job file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from zerobench.errors import ConfigError, did_you_mean
from zerobench.hosts.hostfile import read_hostfile
from zerobench.hosts.job_files import WRITERS
from zerobench.hosts.ssh import run_over_ssh
from zerobench.hosts.torchrun import torchrun_lines


def run_launch(
    command: Sequence[str], *, hostfile: Path, ssh: bool, write: str | None, port: int, gpu: str, image: str
) -> None:
    """Print the lines or the job file, or start the hosts. Raise ConfigError for options that contradict each other."""
    if ssh and write is not None:
        raise ConfigError("--ssh starts the hosts and --write prints a job file: give one of them")
    if write is not None and write not in WRITERS:
        raise ConfigError(
            f"--write {write} is unknown: {did_you_mean(write, WRITERS)}known: {', '.join(WRITERS)}"
        )
    if not 0 < port < 1 << 16:
        raise ConfigError(f"--port {port} is not a TCP port: use one from 1 to 65535")
    hosts = read_hostfile(hostfile)
    if write is not None:
        typer.echo(WRITERS[write](hosts, command, gpu=gpu, image=image), nl=False)
        return
    lines = torchrun_lines(hosts, command, port=port)
    if ssh:
        run_over_ssh(hosts, lines, show=typer.echo)
        return
    for host, line in zip(hosts, lines, strict=True):
        typer.echo(f"# on {host.name}\n{line}")
