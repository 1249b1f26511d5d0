"""`zerobench launch`: lines to copy, lines over ssh, or a job file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from zerobench.errors import ConfigError, did_you_mean
from zerobench.host.consoles import print_document
from zerobench.hosts.hostfile import read_hostfile
from zerobench.hosts.job_files import WRITERS
from zerobench.hosts.ssh import run_over_ssh
from zerobench.hosts.torchrun import torchrun_lines


def run_launch(
    command: Sequence[str],
    *,
    hostfile: Path,
    ssh: bool,
    write: str | None,
    port: int,
    gpu: str,
    image: str,
    as_json: bool,
) -> None:
    """Print the lines or the job file, or start the hosts. Raise ConfigError for options that contradict each other."""
    if ssh and write is not None:
        raise ConfigError("--ssh starts the hosts and --write prints a job file: give one of them")
    if ssh and as_json:
        raise ConfigError("--ssh shows what the hosts print, which is not JSON: remove --json")
    if write is not None and write not in WRITERS:
        raise ConfigError(
            f"--write {write} is unknown: {did_you_mean(write, WRITERS)}known: {', '.join(WRITERS)}"
        )
    if not 0 < port < 1 << 16:
        raise ConfigError(f"--port {port} is not a TCP port: use one from 1 to 65535")
    hosts = read_hostfile(hostfile)
    in_short = f"{sum(host.slots for host in hosts)} ranks on {', '.join(host.name for host in hosts)}"
    if write is not None:
        text = WRITERS[write](hosts, command, gpu=gpu, image=image)
        if as_json:
            print_document(f"a job file of {write} for {in_short}", {"text": text})
        else:
            typer.echo(text, nl=False)
        return
    lines = torchrun_lines(hosts, command, port=port)
    if ssh:
        run_over_ssh(hosts, lines, show=typer.echo)
        return
    found = [{"host": host.name, "line": line} for host, line in zip(hosts, lines, strict=True)]
    if as_json:
        print_document(f"a line for each host: {in_short}", {"lines": found})
        return
    for one in found:
        typer.echo(f"# on {one['host']}\n{one['line']}")
