"""`zerobench bench`: micro-benchmarks of the core. Each command imports what it measures when it runs, so that this
module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerobench.cli.options import AsJson
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console
from zerobench.results.setting_values import name, split
from zerobench.results.sizes import GIB

if TYPE_CHECKING:
    from rich.console import Console

    from zerobench.host.gpus import Gpu
    from zerobench.micro.output import OutputFile

app = typer.Typer(
    help="Micro-benchmarks of the core, next to its peers and the machine's limit.", no_args_is_help=True
)

_MOST_BYTES = 1 << 60

Output = Annotated[
    Path | None, typer.Option(help="A new file for the results: .json (with all samples), .csv or .md.")
]
Repeats = Annotated[int, typer.Option(help="Interleaved samples of every side.")]


@app.callback()
def bench() -> None:
    """Micro-benchmarks of the core, beside its peers and the machine's limit."""


@contextmanager
def results_in(path: Path | None, *, as_json: bool) -> Iterator[tuple[OutputFile, Console]]:
    """Yield the file for the results and the console for tables; Ctrl-C becomes the command line's own way of saying
    so."""
    from zerobench.host.machine import busy_warning
    from zerobench.micro.output import OutputFile

    with OutputFile(path, printed=as_json) as file:
        console = plain_console(stderr=as_json)
        if warning := busy_warning():
            console.print(f"# {warning}", highlight=False, soft_wrap=True)
        try:
            yield file, console
        except KeyboardInterrupt:
            raise typer.Abort from None


def whole_bytes(option: str, value: float, unit_bytes: int) -> int:
    if not 0 < value * unit_bytes < _MOST_BYTES:
        raise ConfigError(f"{option} {value:g} is not valid: give a size above zero that a machine can have")
    return int(value * unit_bytes)


@app.command()
def comm(
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto is cuda where torch sees two GPUs or more.")
    ] = "auto",
    world_size: Annotated[
        str | None,
        typer.Option(
            help="Ranks, all on this host; a comma-separated list for several. Default: 2,4 on CPU, on GPUs all."
        ),
    ] = None,
    collectives: Annotated[
        str, typer.Option(help="A comma-separated list of all_gather, reduce_scatter, all_reduce.")
    ] = "all_gather,reduce_scatter,all_reduce",
    min_bytes: Annotated[int, typer.Option(help="Smallest buffer. Each next is four times as large.")] = 1
    << 16,
    max_bytes: Annotated[
        int | None, typer.Option(help="Largest buffer. Default: 64 MiB on CPU, 1 GiB on GPUs.")
    ] = None,
    communicator: Annotated[
        str | None,
        typer.Option(help="zerobench's on GPUs: nccl, or peer (copy engines; up to 8 GPUs). Default: nccl."),
    ] = None,
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric", help="On GPUs: zerobench's buffers lie in NCCL's symmetric windows."),
    ] = False,
    repeats: Repeats = 15,
    timeout: Annotated[float, typer.Option(help="Seconds after which a stuck rank is an error.")] = 60.0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Collectives of zerobench's communicators: on CPU beside gloo and memcpy, on GPUs beside NCCL and the link.

    Exit code: 0, or 1 when a result was wrong or a rank failed.
    """
    from zerobench.micro.comm import run_comm
    from zerobench.micro.comm_case import CommOptions
    from zerobench.micro.comm_gpu import run_comm_gpu
    from zerobench.micro.comm_gpu_case import MAX_BYTES, CommGpuOptions

    gpus = gpus_for(device, at_least=2)
    if (symmetric or communicator is not None) and not gpus:
        raise ConfigError("--symmetric and --communicator apply to GPUs only: use them with --device cuda")
    usual = f"{len(gpus)}" if gpus else "2,4"
    sizes = split("--world-size", usual if world_size is None else world_size, int)
    given: dict[str, Any] = {
        "world_sizes": sizes,
        "collectives": split("--collectives", collectives, name),
        "min_bytes": min_bytes,
        "max_bytes": (MAX_BYTES if gpus else 1 << 26) if max_bytes is None else max_bytes,
        "repeats": repeats,
        "timeout_s": timeout,
    }
    options = (
        CommGpuOptions(**given, gpus=gpus, communicator=communicator or "nccl", symmetric=symmetric)
        if gpus
        else CommOptions(**given)
    )
    options.check()
    run: Any = run_comm_gpu if gpus else run_comm
    with results_in(output, as_json=as_json) as (file, console):
        raise typer.Exit(run(options, output=file, console=console, notes=plain_console(stderr=True)))


def gpus_for(device: str, *, at_least: int) -> tuple[Gpu, ...]:
    """The GPUs that a benchmark of so many uses; none for the CPU."""
    from zerobench.host.gpus import visible_gpus

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device!r} is unknown: choose auto, cpu or cuda")
    if device == "cpu":
        return ()
    seen = visible_gpus()
    if len(seen.gpus) >= at_least:
        return seen.gpus
    if device == "cuda":
        needed, why = ("a GPU", "two GPUs")[at_least - 1], seen.reason or "torch sees one GPU"
        raise ConfigError(f"--device cuda needs {needed}: {why}; use --device cpu")
    return ()


@app.command()
def adam(
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda (the first GPU); auto is cuda where torch sees a GPU.")
    ] = "auto",
    min_numel: Annotated[
        int | None,
        typer.Option(
            help="Fewest elements. Each next is four times as many. Default: 2^19 on CPU, 2^22 on a GPU."
        ),
    ] = None,
    max_numel: Annotated[
        int | None,
        typer.Option(
            help="Most elements; sizes that do not fit into memory are skipped, with a note. Default: 2^25 on "
            "CPU, 2^28 on a GPU."
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(help="On CPU: a comma-separated list of thread counts. Default: 1 and all cores."),
    ] = None,
    repeats: Repeats = 15,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Adam beside torch's fused AdamW, and how near it comes to memory: a stream of the same mix, or a copy on a GPU.

    Exit code: 0, or 1 when a result differs from the scalar form.
    """
    from zerobench._native import import_torch
    from zerobench.host.machine import cpus_usable
    from zerobench.micro.adam import MAX_NUMEL, MIN_NUMEL, AdamOptions, run_adam
    from zerobench.micro.adam_gpu import MAX_GPU_NUMEL, MIN_GPU_NUMEL, AdamGpuOptions, run_adam_gpu

    gpus = gpus_for(device, at_least=1)
    if threads is not None and gpus:
        raise ConfigError("--threads applies to CPUs only: use it with --device cpu")
    given: dict[str, Any] = {
        "min_numel": (MIN_GPU_NUMEL if gpus else MIN_NUMEL) if min_numel is None else min_numel,
        "max_numel": (MAX_GPU_NUMEL if gpus else MAX_NUMEL) if max_numel is None else max_numel,
        "repeats": repeats,
    }
    run: Callable[..., int]
    if gpus:
        gpu_options = AdamGpuOptions(**given, gpu=gpus[0])
        gpu_options.check()
        run = partial(run_adam_gpu, gpu_options)
    else:
        thread_nums = sorted({1, cpus_usable()}) if threads is None else split("--threads", threads, int)
        options = AdamOptions(**given, thread_nums=thread_nums)
        options.check()
        run = partial(run_adam, options)
    with results_in(output, as_json=as_json) as (file, console):
        import_torch()
        raise typer.Exit(run(output=file, console=console, notes=plain_console(stderr=True)))


@app.command()
def pinned(
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda (all GPUs); auto is cuda where torch sees a GPU.")
    ] = "auto",
    ready_gib: Annotated[
        float | None,
        typer.Option(help="GiB to make ready in fresh processes. Default: 16 with a GPU, 1 without."),
    ] = None,
    copy_bytes: Annotated[int, typer.Option(help="Bytes of one copy.")] = 1 << 28,
    threads: Annotated[
        int | None, typer.Option(help="Threads that fill zerobench's pages. Default: all cores.")
    ] = None,
    ready_repeats: Annotated[
        int, typer.Option(help="Fresh processes of every side, in turn; at least 6.")
    ] = 6,
    repeats: Annotated[int, typer.Option(help="Interleaved samples of every side; at least 6.")] = 15,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Pinned host memory beside torch's: the time until it is ready, and copies each way, both ways, on all GPUs.

    Without a GPU: the time to fill memory, and copies within the host.
    """
    from zerobench.host.machine import cpus_usable
    from zerobench.micro.pinned import PinnedOptions, run_pinned

    gpus = gpus_for(device, at_least=1)
    options = PinnedOptions(
        ready_bytes=whole_bytes("--ready-gib", (16 if gpus else 1) if ready_gib is None else ready_gib, GIB),
        copy_bytes=copy_bytes,
        repeats=repeats,
        ready_repeats=ready_repeats,
        threads=cpus_usable() if threads is None else threads,
        gpus=gpus,
    )
    options.check()
    with results_in(output, as_json=as_json) as (file, console):
        raise typer.Exit(run_pinned(options, output=file, console=console, notes=plain_console(stderr=True)))
