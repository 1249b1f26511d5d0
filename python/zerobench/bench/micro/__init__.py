"""`zerobench bench`: micro-benchmarks of the core. Each command imports what it measures when it runs, so that this
module imports no torch."""

from __future__ import annotations

import typer

app = typer.Typer(help="Micro-benchmarks of the core, beside its peers and the machine's limit.")


@app.callback()
def bench() -> None:
    """Micro-benchmarks of the core, beside its peers and the machine's limit."""
