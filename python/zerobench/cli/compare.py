"""The command `compare`: its options, and how they become a comparison. Importing this imports no torch."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from zerobench.cli.values import model_options
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console, print_document
from zerobench.results.settings import OPTIONS, Takes, flag_of

if TYPE_CHECKING:
    from zerobench.bench.launch.given import GivenRank
    from zerobench.bench.plan.options import CompareOptions
    from zerobench.results.schema import Results

COMPARE_HELP = (
    "Verify and measure strategies side by side.\n\n"
    "These options accept comma-separated lists, and all combinations are compared (--batch-size 4,8 --stages 0,3): "
    f"{', '.join(flag_of(key) for key, option in OPTIONS.items() if option.takes.is_list)}.\n\n"
    "Exit code: 0 when every row is ok, oom or skipped and at least one is ok; 1 when a row is wrong or failed, or "
    "none is ok; 2 when the command cannot start as given; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, with "
    "the rows so far kept."
)


def compare(context: typer.Context, **given: Any) -> None:
    """Run a comparison. ``given``: texts of the options by name, None where an option was not given."""
    start(given, named=named_options(context), run=context.obj)


def start(
    given: Mapping[str, Any],
    *,
    named: frozenset[str],
    further: Sequence[tuple[Mapping[str, Any], frozenset[str]]] = (),
    run: Callable[..., int] | None = None,
    conclude: Callable[[Results, Path], None] | None = None,
) -> NoReturn:
    """Plan a comparison, run it, and raise the exit code. ``named``: flags that were given. ``further``: the same of
    grids whose rows join. ``run``: does something else with the plan than running it. ``conclude`` gets the results
    and their folder at the end."""
    from zerobench import _native
    from zerobench.bench.disk_notes import disk_warnings, tuned_notes
    from zerobench.bench.dry_run import dry_run
    from zerobench.bench.launch.given import follow, given_ranks, meet
    from zerobench.bench.launch.launcher import Launcher
    from zerobench.bench.plan.plan import make_plan
    from zerobench.bench.run import run_comparison
    from zerobench.bench.surroundings import read_surroundings
    from zerobench.host.disks import Disks

    _native.check_installation()
    started = given_ranks(os.environ)
    if started is not None:
        started = meet(started, os.environ)
    if started is not None and started.rank != 0:
        raise typer.Exit(follow(started))
    options = options_of(given, started, named=named)
    plan = make_plan(
        options,
        further=[options_of(texts, started, named=flags) for texts, flags in further],
        given_world_size=started.world_size if started else None,
    )
    plan.warnings.extend(tuned_notes(plan.configurations))
    gpu_name = options.gpus[0].name if options.gpus else None
    plan.warnings.extend(
        disk_warnings(plan.configurations, disks=Disks(), host_ranks=options.host_ranks, gpu_name=gpu_name)
    )
    launcher = started.open_launcher() if started else Launcher()
    endings = [conclude, print_results if options.as_json else None]
    run = dry_run if options.dry_run else run or partial(run_comparison, conclude=in_turn(endings))
    raise typer.Exit(
        run(
            plan,
            output_dir=options.output_dir,
            resume=options.resume,
            host=read_surroundings(options),
            launcher=launcher,
            console=plain_console(stderr=options.as_json),
            notes=plain_console(stderr=True),
        )
    )


def in_turn(
    endings: Sequence[Callable[[Results, Path], None] | None],
) -> Callable[[Results, Path], None]:
    """Return a function that calls those that are not None."""

    def end(results: Results, folder: Path) -> None:
        for ending in filter(None, endings):
            ending(results, folder)

    return end


def print_results(results: Results, folder: Path) -> None:
    """Print the results as one JSON document."""
    from zerobench.bench.show import results_content, verdict

    print_document(verdict(results), {"folder": folder, **results_content(results)})


def options_of(
    given: Mapping[str, Any], started: GivenRank | None, *, named: frozenset[str]
) -> CompareOptions:
    """Return the options of a comparison, with defaults where nothing was given. ``started``: what torchrun or srun
    started. Raises ConfigError."""
    from zerobench.bench.plan.defaults import choose_device, defaults_on
    from zerobench.bench.plan.options import CompareOptions, value_of
    from zerobench.host.gpus import VisibleGpus, visible_gpus
    from zerobench.host.machine import cpus_usable

    asked = {
        key: model_options(text) if key == "model_option" else value_of(key, text)
        for key, text in given.items()
        if text is not None
    }
    chosen = [*dict.fromkeys([*asked.pop("strategies", ()), *asked.pop("stages", ())])]
    if asked.get("config") and chosen:
        raise ConfigError("--config names the rows, so --strategies and --stages cannot be given with it")
    device = str(asked.pop("device"))
    seen = visible_gpus() if device in ("auto", "cuda") else VisibleGpus()
    device = choose_device(device, seen)
    defaults = defaults_on(device, gpu_num=len(seen.gpus), cpu_num=cpus_usable())
    if started:
        defaults["world_size"] = (started.world_size,)
    if chosen:
        asked["strategies"] = tuple(chosen)
    expect_working_folder()
    if any(":" in name for name in (*chosen, *asked.get("model", ()))):
        add_working_folder()
    return CompareOptions(
        host_ranks=started.machine.num_ranks if started else None,
        core_ranks=started.machine.num_core_ranks if started else None,
        gpus=seen.gpus if device == "cuda" else (),
        given=named,
        **{**defaults, **asked, "device": device},
    )


def parameter_of(key: str) -> inspect.Parameter:
    """Return the parameter that typer makes an option of the table from."""
    option = OPTIONS[key]
    if option.takes is Takes.SWITCH:
        kind: Any = bool
    elif option.takes.is_spaced:
        kind = list[str] | None
    else:
        kind = option.convert if option.convert in (int, float) and option.takes is Takes.ONE else str
        kind = kind if option.default is not None else kind | None
    default = False if option.takes is Takes.SWITCH else option.default
    told = typer.Option(flag_of(key), help=option.help, metavar=option.metavar)
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == "" else default,
        annotation=Annotated[kind, told],
    )


def compare_command(command: Callable[..., None], *, first: Sequence[inspect.Parameter] = ()) -> None:
    """Have typer see every option of the table as a parameter of ``command``, in the order of ``--help``; those of
    ``first`` come before."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *first, *map(parameter_of, OPTIONS)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


compare_command(compare)


def named_options(context: typer.Context) -> frozenset[str]:
    """Such as --grad-accum, whether or not with the value that it has anyway."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        flag_of(name)
        for name, source in sources.items()
        if name in OPTIONS and source and source.name == "COMMANDLINE"
    )


def expect_working_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        raise ConfigError(
            "the working directory no longer exists, and ranks start in it: change to one that exists"
        ) from None


def add_working_folder() -> None:
    """A strategy or model of one's own may lie in the working folder, also when the console script was called."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
