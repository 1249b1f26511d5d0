"""The command `recipe`: comparisons as data. Importing this imports no torch."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerobench.cli.compare import compare_command, named_options, options_of, start
from zerobench.cli.options import AsJson
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console, print_document
from zerobench.results.settings import OPTIONS

if TYPE_CHECKING:
    from zerobench.recipes.recipe import Recipe, Texts

app = typer.Typer(
    help="Comparisons that answer a question: options, charts and sentences.", no_args_is_help=True
)

Name = Annotated[str | None, typer.Argument(help="A recipe's name, as `recipe list` prints it.")]
File = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE.toml", help="A recipe of your own, instead of a name."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="The small form: CPU ranks and a small model, done within minutes.")
]

References = Annotated[
    bool,
    typer.Option(
        "--references", help="Print the figures of the recipe's published studies next to the rows'."
    ),
]


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """Print the recipes and the question that each answers."""
    from zerobench.recipes.recipe import find, names

    if as_json:
        found = [{"name": name, "question": find(name).question} for name in names()]
        print_document(f"{len(found)} recipes", {"recipes": found})
        return
    width = max(map(len, names()))
    for name in names():
        plain_console().print(f"{name:{width}}  {find(name).question}", soft_wrap=True, highlight=False)


@app.command()
def show(
    name: Name = None,
    recipe: File = None,
    quick: Quick = False,
    configs: Annotated[
        Path | None,
        typer.Option(
            "--configs",
            metavar="DIR",
            help="Write a configuration file for each row that can have one, and print the command that runs it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the question of a recipe and the equivalent compare command."""
    found = chosen(name, recipe)
    grids = texts_of(found, quick=quick)
    commands = [*map(command_of, grids)]
    row_commands = write_configs(grids, configs) if configs is not None else []
    if as_json:
        content = {"commands": commands, "options": grids, "row_commands": row_commands}
        print_document(found.question, content)
        return
    for line in (f"{found.question}\n", *commands, *row_commands):
        plain_console().print(line, soft_wrap=True, highlight=False, markup=False)


def run(
    context: typer.Context,
    name: Name = None,
    *,
    recipe: File = None,
    quick: Quick = False,
    references: References = False,
    **given: Any,
) -> None:
    """Run a recipe. Options given here win over the recipe's."""
    from functools import partial

    from zerobench.bench.launch.given import given_ranks
    from zerobench.recipes.conclude import conclude
    from zerobench.recipes.recipe import merged

    found = chosen(name, recipe)
    grids = texts_of(found, quick=quick, device=given["device"])
    if given_ranks(os.environ) is not None:  # torchrun or srun decides how many
        for asked in grids:
            asked.pop("world_size", None)
    (texts, named), *further = [merged(asked, given, named_options(context)) for asked in grids]
    if references and not found.studies:
        raise ConfigError(
            "--references has no effect: this recipe names no published study. Remove the option."
        )
    end = partial(conclude, found, console=plain_console(stderr=given["as_json"]), references=references)
    start(texts, named=named, further=further, run=context.obj, conclude=end)


compare_command(run, first=list(inspect.signature(run, eval_str=True).parameters.values())[1:5])
app.command("run", help=f"{run.__doc__} Exit codes are those of compare.")(run)


def chosen(name: str | None, file: Path | None) -> Recipe:
    """Return the recipe of a name or a file. Raise ConfigError unless exactly one is given."""
    from zerobench.recipes.recipe import find, names, read

    if (name is None) == (file is None):
        raise ConfigError(f"name one recipe, or give --recipe FILE.toml: {', '.join(names())}")
    return read(file) if file is not None else find(name or "")


def texts_of(recipe: Recipe, *, quick: bool, device: str = "auto") -> list[Texts]:
    """Return the options of each of the recipe's grids on this machine."""
    from zerobench.host.gpus import VisibleGpus, visible_gpus
    from zerobench.host.machine import cpus_usable

    seen = visible_gpus() if device != "cpu" and not quick else VisibleGpus()
    return recipe.grids(quick=quick, most_ranks=len(seen.gpus) or cpus_usable())


def command_of(texts: Texts) -> str:
    """Return the command that compares the same."""
    from zerobench.recipes.recipe import command_words

    return shlex.join([sys.executable, "-m", "zerobench", "compare", *command_words(texts)])


def write_configs(grids: Sequence[Texts], folder: Path) -> list[str]:
    """Write a configuration file for each row that can have one; return the commands that run them."""
    from zerobench.bench.plan.plan import make_plan
    from zerobench.bench.plan.row_files import write_row_files
    from zerobench.results.settings import flag_of

    defaults = {key: option.default or None for key, option in OPTIONS.items()}
    options, *further = [
        options_of({**defaults, **texts}, None, named=frozenset(map(flag_of, texts))) for texts in grids
    ]
    plan = make_plan(options, further=further)
    try:
        return write_row_files(plan, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot receive configuration files ({error.strerror or error}): give another --configs"
        ) from None
