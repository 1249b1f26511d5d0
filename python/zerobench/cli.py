"""The command line. Importing this imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from zerobench.errors import ConfigError, DataError, Error

T = TypeVar("T")
UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which typer brings under its own name

app = typer.Typer(
    help="Compare ways of training a model on several ranks: are they right, how fast, and in how much memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command."""


def split(option: str, text: str, convert: Callable[[str], T]) -> list[T]:
    """A comma list, each value once, in the order given."""
    values: dict[T, None] = {}
    for part in (piece.strip() for piece in text.split(",")):
        try:
            values[convert(part)] = None
        except ConfigError:
            raise
        except ValueError:
            kind = _KINDS[convert]
            raise ConfigError(f"{option} {part!r} is no {kind}: give one or a comma list of them") from None
    return list(values)


def name(text: str) -> str:
    if not text:
        raise ValueError
    return text


def clip_norm(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def stage_name(text: str) -> str:
    stage = int(text)
    if not 0 <= stage <= 3:
        raise ConfigError(f"--stages {stage} is unknown: ZeRO stages are 0, 1, 2 and 3")
    return f"zero{stage}"


def model_options(pairs: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE texts, values in JSON."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--model-option {pair!r} is no FIELD=VALUE, such as num_heads=8")
        try:
            options[key.strip().replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[key.strip().replace("-", "_")] = value
    return options


_KINDS: dict[Callable[[str], Any], str] = {
    int: "whole number",
    name: "name",
    clip_norm: "number or none",
    stage_name: "ZeRO stage",
}


_COMPARE_HELP = (
    "Verify and measure strategies side by side.\n\n"
    "Options that take a name or a number per row take comma lists too, and their combinations are compared: "
    "--batch-size 4,8 --stages 0,3.\n\n"
    "Exit code: 0 when every row is ok, oom or skipped and at least one is ok; 1 when a row is wrong or failed, or "
    "none is ok; 2 when the command cannot start as given; 130 after Ctrl-C, with the rows so far kept."
)


@app.command(help=_COMPARE_HELP)
def compare(
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda. auto: cuda where torch sees a GPU, one rank on each.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="Presets (tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt-64m, gpt-512m), names of the Hugging Face "
            "hub (facebook/opt-1.3b, hf:gpt2), or a folder with a config.json. Default: tiny, on GPUs gpt2."
        ),
    ] = None,
    num_layers: Annotated[str | None, typer.Option(help="Instead of the preset's.")] = None,
    hidden_size: Annotated[str | None, typer.Option(help="Instead of the preset's.")] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Any other field of the model, such as num_heads=8 or tied_embeddings=false; may be repeated.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Names of strategies (single, zero0 to zero3, compute_only, ddp, fsdp2 and further peers; an unknown "
            "one lists them all), or package.module:ClassName of your own. Default: single, ours, ddp and fsdp2; on "
            "GPUs ours and every installed peer."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(help="Short for strategies zero0 to zero3: --stages 0,3. Joins --strategies."),
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Sequences per rank and micro-batch. Default: 4, on GPUs 8.")
    ] = None,
    seq_length: Annotated[
        str | None, typer.Option(help="Tokens per sequence. Default: 128, on GPUs 1024.")
    ] = None,
    grad_accum: Annotated[str, typer.Option(help="Micro-batches per optimizer step.")] = "1",
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: fp32, on GPUs bf16.")
    ] = None,
    compile: Annotated[
        str, typer.Option(help="What torch.compile compiles: none, block (each repeated block) or whole.")
    ] = "none",
    attention: Annotated[
        str | None, typer.Option(help="sdpa, eager or flash_attention_2. Default: sdpa.")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Of the timed pass; verification has none. Default: 0.")
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32/--no-tf32", help="Multiply fp32 matrices in TF32 on GPUs.")
    ] = False,
    num_steps: Annotated[int, typer.Option(help="Measured optimizer steps.")] = 20,
    warmup_steps: Annotated[int, typer.Option(help="Steps before the measured ones.")] = 5,
    repeats: Annotated[
        int, typer.Option(help="Measure everything this often, interleaved, in fresh processes.")
    ] = 1,
    world_size: Annotated[
        str | None,
        typer.Option(
            help="Ranks. Default: all visible GPUs; without, 2, or 1 on a single core; under torchrun or srun what "
            "those started."
        ),
    ] = None,
    clip: Annotated[str, typer.Option(help="Maximum global gradient norm, or none.")] = "none",
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing/--no-checkpointing", help="Recompute every block's activations in backward."
        ),
    ] = False,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    data: Annotated[
        str,
        typer.Option(
            help="A text file, a folder, stdlib (the interpreter's own Python sources) or synthetic."
        ),
    ] = "stdlib",
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds without progress after which a configuration has failed.")
    ] = 300.0,
    rank_memory_gib: Annotated[
        float | None,
        typer.Option(
            help="GiB of private memory that a rank may take beyond what importing torch took; more is oom."
        ),
    ] = None,
    verify_layers: Annotated[
        int | None,
        typer.Option(
            help="Verify the model with this many layers at most; rows say so. Default: all that fit."
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Strategy or row that speedup and memory change refer to. Default: ddp, else single."
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE...",
            help="zerobench configurations, one row a file, instead of --strategies and --stages.",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where results go. Default: a new results/compare_<time>.")
    ] = None,
) -> None:
    from zerobench.bench.defaults import choose_device, defaults_on
    from zerobench.bench.given import follow, given_ranks
    from zerobench.bench.gpus import VisibleGpus, visible_gpus
    from zerobench.bench.launch import Launcher
    from zerobench.bench.machine import cpus_usable
    from zerobench.bench.plan import CompareOptions, make_plan
    from zerobench.bench.run import run_comparison

    given = given_ranks(os.environ)
    if given is not None and given.rank != 0:
        raise typer.Exit(follow(given))
    chosen = split("--strategies", strategies, name) if strategies is not None else []
    if stages is not None:
        chosen += [stage for stage in split("--stages", stages, stage_name) if stage not in chosen]
    if config and chosen:
        raise ConfigError("--config names the rows, so --strategies and --stages cannot be given with it")
    seen = visible_gpus() if device in ("auto", "cuda") else VisibleGpus()
    device = choose_device(device, seen)
    defaults = defaults_on(device, gpu_num=len(seen.gpus), cpu_num=cpus_usable())
    if world_size is not None:
        world_sizes = split("--world-size", world_size, int)
    else:
        world_sizes = [given.world_size if given else defaults.world_size]
    if any(":" in strategy for strategy in chosen):
        add_working_folder()
    options = CompareOptions(
        device=device,
        gpus=seen.gpus if device == "cuda" else (),
        models=split("--model", defaults.model if model is None else model, name),
        num_layers=[None] if num_layers is None else split("--num-layers", num_layers, int),
        hidden_sizes=[None] if hidden_size is None else split("--hidden-size", hidden_size, int),
        model_options=model_options(model_option or []),
        strategies=chosen or defaults.strategies,
        world_sizes=world_sizes,
        batch_sizes=[defaults.batch_size] if batch_size is None else split("--batch-size", batch_size, int),
        seq_lengths=[defaults.seq_length] if seq_length is None else split("--seq-length", seq_length, int),
        grad_accums=split("--grad-accum", grad_accum, int),
        precisions=split("--precision", defaults.precision if precision is None else precision, name),
        clips=split("--clip", clip, clip_norm),
        checkpointing=checkpointing,
        compiles=split("--compile", compile, name),
        attention=attention,
        dropout=dropout,
        tf32=tf32,
        verify_layers=verify_layers,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        repeats=repeats,
        data=data,
        seed=seed,
        timeout_s=timeout,
        rank_memory_gib=rank_memory_gib,
        baseline=baseline,
        config_files=config or (),
        learning_rate=lr,
    )
    plan = make_plan(options, given_world_size=given.world_size if given else None)
    launcher = given.open_launcher() if given else Launcher()
    raise typer.Exit(
        run_comparison(
            plan, output_dir=output_dir, launcher=launcher, console=Console(), notes=Console(stderr=True)
        )
    )


def add_working_folder() -> None:
    """A strategy of one's own may lie in the working folder, also when the console script was called."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


@app.command()
def show(
    results: Annotated[Path, typer.Argument(help="A results.json or the folder that holds one.")],
    plots: Annotated[
        Path | None, typer.Option(help="Draw the plots into this folder. Default: plots beside results.json.")
    ] = None,
) -> None:
    """The table, the advice and the plots again, from files alone."""
    from zerobench.bench.run import show as show_results
    from zerobench.report import read_results, write_plots

    found = read_results(results)
    show_results(found, Console())
    folder = plots or (results if results.is_dir() else results.parent) / "plots"
    try:
        paths = write_plots(found, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot receive plots ({error.strerror or error}): give a folder to write to as --plots"
        ) from None
    for path in paths:
        Console().print(str(path), soft_wrap=True, highlight=False)


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, the way result files carry it.")] = False,
) -> None:
    """Facts about the machine and the installation."""
    from zerobench.bench.gpus import visible_gpus
    from zerobench.bench.machine import gpu_module_facts, machine_facts, version_facts

    seen = visible_gpus()
    facts = {"machine": machine_facts(seen.gpus), "versions": version_facts(gpus=True)}
    facts["machine"]["cuda_module"] = gpu_module_facts()
    if seen.reason:
        facts["machine"]["no_gpus"] = seen.reason
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    console = Console()
    for line in fact_lines(facts):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def fact_lines(facts: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested facts as dotted lines, bytes in GiB."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += fact_lines(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                lines += fact_lines(item, f"{prefix}{key}.{index}.")
        elif key.endswith("_bytes") and isinstance(value, int):
            lines.append(f"{prefix}{key.removesuffix('_bytes')}: {value / (1 << 30):.1f} GiB")
        else:
            lines.append(f"{prefix}{key}: {value}")
    return lines


def gather_files(arguments: Sequence[str]) -> list[str]:
    """`--config a b c` as `--config a --config b --config c`, which is how the parser takes several values."""
    result: list[str] = []
    repeating = False
    for argument in arguments:
        if repeating and not argument.startswith("-") and result[-1] != "--config":
            result.append("--config")
        elif argument.startswith("-"):
            repeating = argument == "--config"
        result.append(argument)
    return result


def main() -> None:
    """Every error that a user can cause ends in one line on stderr, and no traceback."""
    from zerobench.bench import micro

    app.add_typer(micro.app, name="bench")
    arguments = gather_files(sys.argv[1:]) or ["--help"]
    debug = "--debug" in arguments
    try:
        code = app(args=arguments, prog_name="zerobench", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except UsageError as error:
        fail(error.format_message(), 2)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Error as error:
        if debug:
            raise
        fail(str(error), 2 if isinstance(error, ConfigError | DataError) else 1)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> None:
    Console(stderr=True).print(
        f"zerobench: {message}", style="red", soft_wrap=True, highlight=False, markup=False
    )
    sys.exit(code)
