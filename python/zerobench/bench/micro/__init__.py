"""`zerobench bench`: micro-benchmarks of the core. Each command imports what it measures when it runs, so that this
module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from zerobench.errors import ConfigError

if TYPE_CHECKING:
    from zerobench.bench.micro.output import OutputFile

app = typer.Typer(help="Micro-benchmarks of the core, beside its peers and the machine's limit.")

Output = Annotated[
    Path | None, typer.Option(help="A new file for the results: .json (with all samples), .csv or .md.")
]
Repeats = Annotated[int, typer.Option(help="Interleaved samples of every side.")]


@app.callback()
def bench() -> None:
    """Micro-benchmarks of the core, beside its peers and the machine's limit."""


def result_console() -> Console:
    """As wide as the table where the output is no terminal and the environment gives no width."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=150)


@contextmanager
def results_in(path: Path | None) -> Iterator[OutputFile]:
    """The file for the results; Ctrl-C becomes the command line's own way of saying so."""
    from zerobench.bench.micro.output import OutputFile

    with OutputFile(path) as file:
        try:
            yield file
        except KeyboardInterrupt:
            raise typer.Abort from None


def whole_numbers(option: str, text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no whole number: give one or a comma list of them") from None


@app.command()
def comm(
    world_size: Annotated[
        str, typer.Option(help="Ranks, all on this host; a comma list for several.")
    ] = "2,4",
    collectives: Annotated[
        str, typer.Option(help="A comma list of all_gather, reduce_scatter, all_reduce.")
    ] = "all_gather,reduce_scatter,all_reduce",
    min_bytes: Annotated[int, typer.Option(help="Smallest buffer. Each next is four times as large.")] = 1
    << 16,
    max_bytes: Annotated[int, typer.Option(help="Largest buffer.")] = 1 << 26,
    repeats: Repeats = 15,
    timeout: Annotated[float, typer.Option(help="Seconds after which a stuck rank is an error.")] = 60.0,
    output: Output = None,
) -> None:
    """Collectives of the shared-memory communicator beside gloo, and how near they come to memcpy.

    Exit code: 0, or 1 when a result was wrong or a rank failed.
    """
    from zerobench.bench.micro.comm import CommOptions, run_comm

    options = CommOptions(
        world_sizes=whole_numbers("--world-size", world_size),
        collectives=[name.strip() for name in collectives.split(",")],
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        repeats=repeats,
        timeout_s=timeout,
    )
    options.check()
    with results_in(output) as file:
        raise typer.Exit(run_comm(options, output=file, console=result_console(), notes=Console(stderr=True)))


@app.command()
def adam(
    min_numel: Annotated[int, typer.Option(help="Fewest elements. Each next is four times as many.")] = 1
    << 19,
    max_numel: Annotated[
        int, typer.Option(help="Most elements; sizes that do not fit into memory are left out, with a note.")
    ] = 1 << 25,
    threads: Annotated[
        str | None, typer.Option(help="A comma list of thread counts. Default: 1 and all cores.")
    ] = None,
    repeats: Repeats = 15,
    output: Output = None,
) -> None:
    """CPU Adam beside torch's fused AdamW, and how near it comes to a memory stream of the same mix.

    Exit code: 0, or 1 when a result differs from the scalar form.
    """
    from zerobench.bench.machine import cpus_usable
    from zerobench.bench.micro.adam import AdamOptions, run_adam

    options = AdamOptions(
        thread_nums=sorted({1, cpus_usable()}) if threads is None else whole_numbers("--threads", threads),
        min_numel=min_numel,
        max_numel=max_numel,
        repeats=repeats,
    )
    options.check()
    with results_in(output) as file:
        raise typer.Exit(run_adam(options, output=file, console=result_console(), notes=Console(stderr=True)))
