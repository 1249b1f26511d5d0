"""`zerobench bench io` and `zerobench tune io`. Importing this imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerobench.cli.bench import Output, Repeats, app, results_in, whole_bytes
from zerobench.cli.options import AsJson
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console
from zerobench.results.setting_values import name, split
from zerobench.results.sizes import GIB, MIB

tune_app = typer.Typer(
    help="Finds the fastest settings for this machine and keeps them for later runs.", no_args_is_help=True
)

SizeGib = Annotated[
    float | None,
    typer.Option(
        help="GiB of all files together; make it larger than the disk's own cache. Default: 8, less where a quarter "
        "of the free space or ten seconds of writing are less."
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        help="File of tuned settings. Default: zerobench/io.json in $XDG_CONFIG_HOME, by default ~/.config."
    ),
]
ChunkMib = Annotated[float, typer.Option(help="MiB of a chunk, the unit that is swapped.")]


def gib(size_gib: float | None) -> int | None:
    return None if size_gib is None else whole_bytes("--size-gib", size_gib, GIB)


@app.command()
def io(
    paths: Annotated[
        list[Path], typer.Argument(help="Directories on the disks to measure; several are striped.")
    ],
    engines: Annotated[
        str | None,
        typer.Option(
            help="A comma-separated list of io_uring, threads. Default of this and the next two: what `tune io` "
            "found for the first path, else both engines, 1 MiB and 4 MiB, 8 and 32."
        ),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(help="Bytes of one request, multiples of 4096; a comma-separated list.")
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(help="Requests in flight (threads: as many threads); a comma-separated list."),
    ] = None,
    modes: Annotated[
        str, typer.Option(help="A comma-separated list of read, write, both.")
    ] = "read,write,both",
    chunk_mib: ChunkMib = 16.0,
    size_gib: SizeGib = None,
    settings: Settings = None,
    sample_seconds: Annotated[float, typer.Option(help="Length of one sample, about.")] = 0.5,
    repeats: Repeats = 7,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """The swap engines beside the disk's own limit: plain loops over the same files.

    What `tune io` found for the folder is measured, unless --engines, --block-bytes or --depth say what else;
    --settings goes with none of them.

    Exit code: 0, or 1 when a transfer failed.
    """
    from zerobench.host.io_settings import default_file, settings_for
    from zerobench.micro.io import IoOptions, run_io

    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"{', '.join(map(str, paths))}: a folder is named twice: name each once")
    console = plain_console(stderr=as_json)
    if engines is None and block_bytes is None and depth is None:
        known = settings or default_file()
        if tuned := settings_for(paths[0], file=known):
            engines, block_bytes, depth = tuned.engine, str(tuned.block_bytes), str(tuned.depth)
            console.print(f"# tuned settings of {known}", highlight=False, soft_wrap=True)
        elif settings is not None:
            raise ConfigError(
                f"--settings {settings} holds nothing about {paths[0]}: run `zerobench tune io {paths[0]} --settings "
                f"{settings}` first, or remove it"
            )
    elif settings is not None:
        raise ConfigError(
            "--settings gives engine, block and depth: give it without the options that do so too"
        )
    options = IoOptions(
        paths=paths,
        engines=split("--engines", "io_uring,threads" if engines is None else engines, name),
        block_bytes=split("--block-bytes", "1048576,4194304" if block_bytes is None else block_bytes, int),
        depths=split("--depth", "8,32" if depth is None else depth, int),
        modes=split("--modes", modes, name),
        chunk_bytes=whole_bytes("--chunk-mib", chunk_mib, MIB),
        file_bytes=gib(size_gib),
        repeats=repeats,
        sample_s=sample_seconds,
    )
    options.check()
    with results_in(output, as_json=as_json) as (file, console):
        raise typer.Exit(run_io(options, output=file, console=console, notes=plain_console(stderr=True)))


@tune_app.callback()
def tune() -> None:
    """Finds the fastest settings for this machine and keeps them for later runs."""


@tune_app.command("io")
def tune_io(
    path: Annotated[Path, typer.Argument(help="The directory that state will be swapped to.")],
    seconds: Annotated[float, typer.Option(help="Time for the search.")] = 30.0,
    chunk_mib: ChunkMib = 16.0,
    size_gib: SizeGib = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Block size, depth and engine with which a path swaps fastest, kept in a file that later runs read.

    Exit code: 0, or 1 when a transfer failed.
    """
    from zerobench.host.io_settings import check_settings_file, default_file
    from zerobench.micro.io_tune import TuneOptions, run_tune_io

    options = TuneOptions(
        path=path,
        seconds=seconds,
        file_bytes=gib(size_gib),
        chunk_bytes=whole_bytes("--chunk-mib", chunk_mib, MIB),
        settings_file=settings or default_file(),
    )
    options.check()
    check_settings_file(options.settings_file)  # what cannot be added to is found before time is spent
    try:
        raise typer.Exit(
            run_tune_io(
                options,
                console=plain_console(stderr=as_json),
                notes=plain_console(stderr=True),
                as_json=as_json,
            )
        )
    except KeyboardInterrupt:
        raise typer.Abort from None
