"""Launchers that run side by side on this machine, each torchrun with one rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_launchers(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    port: int,
    folder: Path | None = None,
    timeout_s: float = 120.0,
) -> list[str]:
    """Run ``command`` (what follows torchrun's options) under one launcher for each environment. Return what each wrote
    to its standard output; an error of one fails the caller."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    torchrun += ["--nnodes", str(len(environments)), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    launchers = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(number), *command],
            env=dict(environment),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, environment in enumerate(environments)
    ]
    try:
        outputs = [launcher.communicate(timeout=timeout_s) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # torchrun ends its ranks
            launcher.wait(timeout=30)
    for launcher, (_, errors) in zip(launchers, outputs, strict=True):
        assert launcher.returncode == 0, errors
    return [output for output, _ in outputs]
