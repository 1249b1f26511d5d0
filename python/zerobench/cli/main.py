"""The command line. Importing this imports no torch."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from zerobench import __version__
from zerobench.cli import bench, bench_io, recipe
from zerobench.cli.advise import advise
from zerobench.cli.compare import COMPARE_HELP, compare
from zerobench.cli.diff import diff
from zerobench.cli.exit_codes import ExitCode
from zerobench.cli.network import network
from zerobench.cli.options import AsJson
from zerobench.cli.report import report
from zerobench.cli.results import chart, show
from zerobench.cli.trace import trace
from zerobench.errors import ConfigError, DataError, Error
from zerobench.export.targets import TARGETS
from zerobench.host import interrupts
from zerobench.host.consoles import drop_stdout, forget_unknown_size, plain_console, print_document
from zerobench.hosts.job_files import WRITERS
from zerobench.results.settings import OPTIONS, flag_of

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which typer brings under its own name

app = typer.Typer(
    help="Compare ways of training a model on several ranks: are they right, how fast, and in how much memory.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zerobench {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error. Give it before the command: zerobench --debug compare.",
        ),
    ] = False,
) -> None:
    """Options of every command."""


app.command(help=COMPARE_HELP)(compare)
app.command()(report)
app.command()(diff)
app.command()(show)
app.command()(chart)
app.command()(advise)
app.command()(network)
app.add_typer(bench.app, name="bench")
app.add_typer(bench_io.tune_app, name="tune")
app.add_typer(recipe.app, name="recipe")
app.command()(trace)


@app.command()
def info(
    as_json: AsJson = False,
) -> None:
    """Facts about the machine and the installation."""
    from zerobench.cli.facts import fact_lines, in_short
    from zerobench.host.inventory import collect_facts

    facts = collect_facts()
    verdict = in_short(facts)
    if as_json:
        print_document(verdict, facts)
        return
    for name in ("cuda_module", "cuda_reason"):  # which machine.cuda_module tells in words
        facts["machine"]["details"]["build"].pop(name, None)
    console = plain_console()
    for line in (verdict, *fact_lines(facts)):
        console.print(line, soft_wrap=True, highlight=False)


@app.command()
def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="A folder for swapped state. Its disk is examined too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what stops or slows training on this machine, what it costs and how to mend it.

    The exit code is 1 if there is an error or a warning, else 0."""
    from zerobench.doctor.examine import examine
    from zerobench.doctor.show import finding_lines, findings_content, verdict
    from zerobench.host.inventory import collect_facts
    from zerobench.host.storage import check_directories

    check_directories([] if path is None else [path])
    findings = examine(collect_facts(path))
    if as_json:
        print_document(verdict(findings), findings_content(findings))
    else:
        console = plain_console()
        for line in finding_lines(findings):
            console.print(line, soft_wrap=True, highlight=False)
    if any(finding.level != "note" for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def export(
    results: Annotated[
        str,
        typer.Argument(
            metavar="RESULTS[#ROW]",
            help="A results.json or the folder that holds one, and the name of a row. Default: the row that "
            "`advise` names.",
        ),
    ],
    to: Annotated[str, typer.Option("--to", help=f"The tool: {', '.join(TARGETS)}.")],
    output: Annotated[
        Path | None, typer.Option(help="Write this new file. Default: standard output.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            help="Change this DeepSpeed file in place; the old one is kept as FILE.bak, and the change is printed."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a row as a configuration or a launch line of the tool that you train with."""
    from zerobench.cli.export import run_export

    run_export(results, to=to, output=output, into=into, as_json=as_json)


@app.command()
def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="The command that every host runs, after --.")
    ],
    hostfile: Annotated[
        Path, typer.Option(help="A line `host slots=N` for each host, as DeepSpeed reads it.")
    ],
    ssh: Annotated[
        bool, typer.Option("--ssh", help="Start the lines over ssh, in this folder's path.")
    ] = False,
    write: Annotated[
        str | None, typer.Option(help=f"Print a job file instead: {', '.join(WRITERS)}.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="TCP port of the first host at which ranks find each other.")
    ] = 29500,
    gpu: Annotated[str, typer.Option(help="The kind of GPU that a job file asks for, such as H100.")] = "",
    image: Annotated[str, typer.Option(help="The container image of --write kubeflow.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the torchrun line of each host, start them over ssh, or write a job file of a cluster."""
    from zerobench.cli.launch import run_launch

    run_launch(
        command,
        hostfile=hostfile,
        ssh=ssh,
        write=write,
        port=port,
        gpu=gpu,
        image=image,
        as_json=as_json,
    )


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
SEVERAL_VALUES = {flag_of(key) for key, option in OPTIONS.items() if option.takes.is_spaced}


def gather_values(arguments: Sequence[str]) -> list[str]:
    """Return `--config a b c` as `--config a --config b --config c`, which is how the parser takes several values."""
    result: list[str] = []
    repeating = ""
    for index, argument in enumerate(arguments):
        if argument == "--":  # no options follow
            return [*result, *arguments[index:]]
        if repeating and not argument.startswith("-") and result[-1] != repeating:
            result.append(repeating)
        elif argument.startswith("-"):
            option = argument.partition("=")[0]
            repeating = option if option in SEVERAL_VALUES else ""
        result.append(argument)
    return result


def main() -> None:
    """Every error that a user can cause ends in one line on stderr, and no traceback."""
    open_standard_descriptors()
    forget_unknown_size()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="replace")  # whatever the locale can write
    interrupts.interrupt_on_signals()
    expect_text(sys.argv[1:])
    arguments = gather_values(sys.argv[1:]) or ["--help"]
    debug = "--debug" in arguments
    try:
        code = app(args=arguments, prog_name="zerobench", standalone_mode=False)
        if code == 128 + signal.SIGINT:  # what typer makes of any interrupt that reaches it
            code = interrupts.exit_code()
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted", interrupts.exit_code())
    except UsageError as error:
        if not error.format_message():  # `zerobench bench`, whose help was shown
            sys.exit(ExitCode.USAGE)
        fail(error.format_message(), ExitCode.USAGE)
    except BrokenPipeError:  # `| head` has seen enough
        drop_stdout()
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        if debug:
            traceback.print_exc()
        if error.errno in _NO_MORE_FILES:
            fail(f"{error.strerror}: raise the limit (`ulimit -n`), or start fewer ranks", ExitCode.FAILED)
        if error.filename is None and error.errno in _FULL:
            drop_stdout()
            fail(f"standard output cannot be written ({error.strerror})", ExitCode.FAILED)
        fail(f"{error} (zerobench --debug shows where)", ExitCode.FAILED)
    except Error as error:
        if debug:
            traceback.print_exc()
        fail(str(error), ExitCode.USAGE if isinstance(error, ConfigError | DataError) else ExitCode.FAILED)
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


def expect_text(arguments: Sequence[str]) -> None:
    """Result files are UTF-8 and hold the command with all names in it; Python keeps other bytes as half surrogates."""
    for argument in arguments:
        if any("\udc80" <= character <= "\udcff" for character in argument):
            fail(
                f"the argument {argument} is not text in this locale's encoding ({sys.getfilesystemencoding()}): give "
                "another name, or set LC_ALL=C.UTF-8 if it is UTF-8",
                ExitCode.USAGE,
            )


def open_standard_descriptors() -> None:
    """Open the standard descriptors that a caller has closed. Otherwise the first files and pipes that are opened would
    become standard input and output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def fail(message: str, code: int) -> None:
    plain_console(stderr=True).print(f"zerobench: {message}", style="red", soft_wrap=True, highlight=False)
    sys.exit(code)
