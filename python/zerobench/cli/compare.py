"""The command `compare`: its options, and how they become a comparison. Importing this imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from zerobench.cli.values import clip_norm, folder, model_options, name, on_or_off, share, split, stage_name
from zerobench.errors import ConfigError
from zerobench.host.consoles import plain_console

COMPARE_HELP = (
    "Verify and measure strategies side by side.\n\n"
    "These take comma lists, whose combinations are compared (--batch-size 4,8 --stages 0,3): --model, "
    "--num-layers, --hidden-size, --strategies, --stages, --batch-size, --seq-length, --grad-accum, --precision, "
    "--compile, --offload, --offload-ratio, --optimizer-in-backward, --communicator, --world-size, --clip.\n\n"
    "Exit code: 0 when every row is ok, oom or skipped and at least one is ok; 1 when a row is wrong or failed, or "
    "none is ok; 2 when the command cannot start as given; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, with "
    "the rows so far kept."
)


def compare(
    context: typer.Context,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda. auto: cuda where torch sees a GPU, one rank on each.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="Presets (tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt-64m, and gpt-512m, which has the shape of "
            "gpt2-medium), llama-1.3b, llama, names of the Hugging Face hub (facebook/opt-1.3b, hf:gpt2), or a folder "
            "with a config.json. Default: tiny, on GPUs gpt2."
        ),
    ] = None,
    num_layers: Annotated[str | None, typer.Option(help="Layers, instead of the model's own.")] = None,
    hidden_size: Annotated[str | None, typer.Option(help="Width, instead of the model's own.")] = None,
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
            help="single, compute_only, zero0 to zero3, ddp, ddp_compress, ddp_master, fsdp1, fsdp2, fsdp2_keep, "
            "deepspeed0 to deepspeed3, deepspeed3_leaves, deepspeed3_super, deepcompile3 (also with _prefetch, "
            "_selective or _both behind it), mfsdp1 to mfsdp3, or package.module:ClassName of your own. Default: "
            "single, zero0 to zero3, ddp and fsdp2; on GPUs compute_only to fsdp2_keep, and deepspeed0 to "
            "deepspeed3_leaves and mfsdp1 to mfsdp3 where they are installed."
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
    offload: Annotated[
        str,
        typer.Option(
            help="What leaves the device: none, cpu_optimizer (optimizer state, to host memory), cpu_full (parameters "
            "too), nvme (optimizer state, to NVMe) or nvme_full (parameters too)."
        ),
    ] = "none",
    offload_ratio: Annotated[
        str | None,
        typer.Option(
            help="Share of the optimizer state that leaves the device, above 0 to 1 (DeepSpeed's rows take 0 too), or "
            "auto: what the device cannot hold. Default: all of it."
        ),
    ] = None,
    nvme_path: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER...", help="Where --offload nvme and nvme_full put files; several are striped."
        ),
    ] = None,
    io_engine: Annotated[
        str | None,
        typer.Option(
            help="Of zerobench's own rows on NVMe: io_uring or threads. Default: what `tune io` found, else io_uring."
        ),
    ] = None,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(
            help="GiB of host memory that offloaded state of all ranks may take; what is beyond goes to NVMe, or is "
            "oom. Default: for cpu_optimizer and cpu_full what the host has; for nvme and nvme_full what buffers take, "
            "so state swaps unless they hold it."
        ),
    ] = None,
    optimizer_in_backward: Annotated[
        str, typer.Option(help="Whether updates begin during backward: on, off, or both as a list.")
    ] = "off",
    device_memory_gib: Annotated[
        float | None, typer.Option(help="GiB of its device that a rank may use; more is oom.")
    ] = None,
    communicator: Annotated[
        str,
        typer.Option(
            help="Of zerobench's own rows: auto, shm or c10d on CPU, nccl or peer (copy engines, GPUs of one host) on "
            "GPUs."
        ),
    ] = "auto",
    bind: Annotated[
        str, typer.Option(help="none, or numa: each rank runs on its share of its NUMA node's cores.")
    ] = "none",
    attention: Annotated[
        str | None, typer.Option(help="sdpa, eager or flash_attention_2. Default: sdpa.")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout of the timed pass; verification has none. Default: 0.")
    ] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Multiply fp32 matrices in TF32 on GPUs.")] = False,
    num_steps: Annotated[int, typer.Option(help="Measured optimizer steps.")] = 20,
    warmup_steps: Annotated[
        int | None, typer.Option(help="Steps before the measured ones. Default: 5, on GPUs 20.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Measure everything this often, interleaved, in fresh processes.")
    ] = 1,
    world_size: Annotated[
        str | None,
        typer.Option(
            help="Ranks. Default: all visible GPUs; on CPU 2, or 1 on a single core; under torchrun or srun what those "
            "started."
        ),
    ] = None,
    clip: Annotated[str, typer.Option(help="Maximum global gradient norm, or none.")] = "none",
    checkpointing: Annotated[
        bool,
        typer.Option("--checkpointing", help="Recompute every block's activations in backward."),
    ] = False,
    lr: Annotated[
        float,
        typer.Option(
            help="Learning rate of AdamW, whose betas are 0.9 and 0.999 and weight decay 0.1; a file of --config may "
            "set others."
        ),
    ] = 1e-3,
    data: Annotated[
        str,
        typer.Option(
            help="A text file, a folder (hidden files and folders of results are left out), stdlib (the interpreter's "
            "own Python sources) or synthetic. It must stay as it is while the comparison runs."
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
            help="Strategy or row that speedup and memory change refer to. Default: the first of ddp, ddp_master and "
            "single that has a row which is ok and comparable."
        ),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE...",
            help="Configurations of zerobench or DeepSpeed, one row a file, instead of --strategies and --stages. "
            "What a file leaves open, the options decide; what it sets, they may not contradict.",
        ),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where results go. Default: a new results/compare_<time>."),
    ] = None,
) -> None:
    from zerobench import _native
    from zerobench.bench.host_facts import read_host_facts
    from zerobench.bench.launch.given import follow, given_ranks
    from zerobench.bench.launch.launcher import Launcher
    from zerobench.bench.plan.defaults import choose_device, defaults_on
    from zerobench.bench.plan.options import CompareOptions
    from zerobench.bench.plan.plan import make_plan
    from zerobench.bench.run import run_comparison
    from zerobench.bench.swap.notes import disk_warnings, tuned_notes
    from zerobench.host.gpus import VisibleGpus, visible_gpus
    from zerobench.host.machine import cpus_usable

    _native.check_installation()
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
    expect_working_folder()
    if any(":" in strategy for strategy in chosen):
        add_working_folder()
    options = CompareOptions(
        host_ranks=given.local_world_size if given else None,
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
        offloads=split("--offload", offload, name),
        offload_ratios=[None] if offload_ratio is None else split("--offload-ratio", offload_ratio, share),
        nvme_paths=[folder("--nvme-path", path) for path in nvme_path or ()],
        io_engine=io_engine,
        host_memory_gib=host_memory_gib,
        optimizer_in_backward=split("--optimizer-in-backward", optimizer_in_backward, on_or_off),
        device_memory_gib=device_memory_gib,
        communicators=split("--communicator", communicator, name),
        bind=bind,
        attention=attention,
        dropout=dropout,
        tf32=tf32,
        verify_layers=verify_layers,
        num_steps=num_steps,
        warmup_steps=defaults.warmup_steps if warmup_steps is None else warmup_steps,
        repeats=repeats,
        data=data,
        seed=seed,
        timeout_s=timeout,
        rank_memory_gib=rank_memory_gib,
        baseline=baseline,
        config_files=config or (),
        learning_rate=lr,
        given=named_options(context),
    )
    results_in = None if output_dir is None else folder("--output-dir", output_dir)
    plan = make_plan(options, given_world_size=given.world_size if given else None)
    plan.warnings.extend(tuned_notes(plan.configurations))
    gpu_name = options.gpus[0].name if options.gpus else None
    plan.warnings.extend(disk_warnings(plan.configurations, host_ranks=options.host_ranks, gpu_name=gpu_name))
    launcher = given.open_launcher() if given else Launcher()
    run = context.obj or run_comparison  # a caller from Python may do something else with the plan
    raise typer.Exit(
        run(
            plan,
            output_dir=results_in,
            host=read_host_facts(options),
            launcher=launcher,
            console=plain_console(),
            notes=plain_console(stderr=True),
        )
    )


def named_options(context: typer.Context) -> frozenset[str]:
    """Such as --grad-accum, whether or not with the value that it has anyway."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        "--" + name.replace("_", "-")
        for name, source in sources.items()
        if source and source.name == "COMMANDLINE"
    )


def expect_working_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        raise ConfigError(
            "the working folder is gone, and ranks start there: change to one that exists"
        ) from None


def add_working_folder() -> None:
    """A strategy of one's own may lie in the working folder, also when the console script was called."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
