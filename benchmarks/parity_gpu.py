"""Holds zero0 to zero3 against each other, bit for bit, on this machine's GPUs, and their losses against DDP's.

    torchrun --nproc_per_node N benchmarks/parity_gpu.py --output benchmarks/parity_gpu_h200_N.md

Each cell trains a GPT-2 (tied embeddings) or a Llama of transformers, cut to a few layers, at every stage for 20 steps
under deterministic algorithms, eager and compiled by block, in three precisions, with clipping and checkpointing in
turn: checksums of all parameters, every gradient norm and every loss must be equal. Then each model trains 50 steps as
users train, at every stage and with DDP, and the losses must stay together; in fp16 both must skip the same steps too.
CPU ranks do too (``--device cpu``). More ranks than GPUs take turns on them (``--device shared``, without DDP, since
NCCL wants a GPU for each rank).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerobench import data, models, strategies
from zerobench.results.files import write_atomically
from zerobench.strategies.base import LossScaleSettings, OptimizerSettings, StrategySettings
from zerobench.strategies.shared import checksum

STAGES = ("zero0", "zero1", "zero2", "zero3")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("hf:gpt2", {"num_layers": 3}),
    "Llama": ("llama-1.3b", {"num_layers": 2, "hidden_size": 1024, "num_heads": 16}),
}
COMPILES = ["none", "block"]
PRECISIONS = ("bf16", "fp16", "fp32")
NUM_STEPS = 20
NUM_LOSS_STEPS = 50
BATCH_SIZE = 2
SEQ_LENGTH = 128
# Largest difference of a step's loss from DDP's, relative. DDP under autocast keeps fp32 parameters, so in low
# precision the two trainings round differently from the first forward on; measured: see the tables. fp16 rounds 8 times
# finer than bf16.
LOSS_TOLERANCES = {"bf16": 0.02, "fp16": 2.5e-3, "fp32": 1e-3}
# In fp16 the loss scale must not tell the two apart: gradients summed over ranks in fp16, as ours are, overflow at
# lower scales than DDP's, which are summed in fp32. Step 1 overflows on any side, at 2^10 and up to 2^12 none does, and
# to there the scale grows within the steps.
LOSS_SCALE = LossScaleSettings(initial_scale=2.0**30, backoff_factor=2.0**-20, growth_interval_steps=20)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of settings."""

    model: str
    precision: str
    compile: str
    clip: bool
    checkpointing: bool


def grid(compiles: Sequence[str]) -> list[Cell]:
    """Clipping and checkpointing take every combination over the cells of a model."""
    cells = []
    for model in MODELS:
        for row, precision in enumerate(PRECISIONS):
            for column, mode in enumerate(compiles):
                cells.append(
                    Cell(
                        model, precision, mode, clip=(row + column) % 2 == 0, checkpointing=row % 2 == column
                    )
                )
    return cells


def make_settings(device: str, cell: Cell, *, name: str, deterministic: bool) -> StrategySettings:
    rank = int(os.environ["RANK"])
    on_gpu = device != "cpu"
    return StrategySettings(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=torch.cuda.current_device() if on_gpu else rank,
        local_world_size=int(os.environ["WORLD_SIZE"]),
        rendezvous=f"parity-{os.environ['MASTER_PORT']}-{cell}-{name}-{deterministic}",
        device="cuda" if on_gpu else "cpu",
        precision=cell.precision,
        batch_size=BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        clip=0.5 if cell.clip else None,
        checkpointing=cell.checkpointing,
        compile=cell.compile,
        optimizer=OptimizerSettings(lr=1e-3 if deterministic else 1e-4),
        loss_scale=LossScaleSettings() if deterministic else LOSS_SCALE,
        timeout_s=120.0,
        deterministic=deterministic,
        options={"communicator": "peer"} if device == "shared" else {},
    )


def train(name: str, cell: Cell, *, device: str, num_steps: int, deterministic: bool) -> dict[str, Any]:
    """Losses and norms of all steps, which were skipped, and the checksum at the end (deterministic ones only)."""
    preset, sizes = MODELS[cell.model]
    config = models.resolve(preset, sizes)
    settings = make_settings(device, cell, name=name, deterministic=deterministic)
    dataset = data.open_data("stdlib", seed=0, seq_length=SEQ_LENGTH, vocab_size=config.vocab_size)
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", settings.local_rank)
    strategy = strategies.get(name)(settings)
    strategy.build(functools.partial(models.build, config, 0))
    losses, norms, skipped = [], [], []
    for step in range(num_steps):
        batches = dataset.micro_batches(
            step, rank=settings.rank, world_size=settings.world_size, batch_size=BATCH_SIZE, grad_accum=1
        )
        placed = [{key: value.to(where) for key, value in batch.items()} for batch in batches]
        result = strategy.step(placed, norm=True)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if not result.applied:
            skipped.append(step + 1)
    found = {
        "losses": [float(loss) for loss in losses],
        "norms": [float(norm) for norm in norms if norm is not None],
        "skipped": skipped,
        "checksum": checksum(strategy.full_parameters()) if deterministic else None,
    }
    strategy.close()
    del strategy
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return found


def of_all_ranks(found: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return everyones


def judge_bits(cell: Cell, device: str) -> tuple[bool, float]:
    """Whether all stages and ranks ended alike; and the last loss."""
    found = {
        name: train(name, cell, device=device, num_steps=NUM_STEPS, deterministic=True) for name in STAGES
    }
    same_losses = len({tuple(result["losses"]) for result in found.values()}) == 1  # each rank has its own
    ends = {(tuple(result["norms"]), result["checksum"]) for result in found.values()}
    everyones = of_all_ranks((same_losses, ends))
    identical = all(same for same, _ in everyones) and len(set().union(*(ends for _, ends in everyones))) == 1
    return identical, found["zero0"]["losses"][-1]


@dataclasses.dataclass(frozen=True)
class Course:
    """How a training went, step by step."""

    losses: list[float]  # means over ranks
    skipped: list[int]  # steps, from 1, that fp16 overflow skipped


def courses(cell: Cell, device: str) -> dict[str, Course]:
    """Of DDP and of every stage, as users train."""
    found = {}
    for name in ("ddp", *STAGES):
        trained = train(name, cell, device=device, num_steps=NUM_LOSS_STEPS, deterministic=False)
        means = [sum(step) / len(step) for step in zip(*of_all_ranks(trained["losses"]), strict=True)]
        found[name] = Course(means, trained["skipped"])
    return found


def worst_loss(mine: Course, of_ddp: Course) -> float:
    """The largest relative difference of a step's loss; NaN where a loss is."""
    differences = [abs(loss / other - 1) for loss, other in zip(mine.losses, of_ddp.losses, strict=True)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def skipped_alone(found: Mapping[str, Course]) -> list[str]:
    """A sentence for each step that either a stage or DDP skipped, and not both: from there on the two trainings are of
    different steps."""
    sentences = []
    for name in STAGES:
        for step in sorted({*found[name].skipped} ^ {*found["ddp"].skipped}):
            who, other = (name, "ddp") if step in found[name].skipped else ("ddp", name)
            sentences.append(f"step {step} was skipped by {who} and not by {other}")
    return sentences


def follows(cell: Cell, found: Mapping[str, Course]) -> bool:
    """Whether every stage's losses stayed with DDP's, and the same steps were skipped."""
    tolerance = LOSS_TOLERANCES[cell.precision]
    return not skipped_alone(found) and all(
        worst_loss(found[name], found["ddp"]) <= tolerance for name in STAGES
    )


def markdown(
    bits: Sequence[tuple[Cell, bool, float]],
    losses: Sequence[tuple[Cell, dict[str, Course]]],
    *,
    options: argparse.Namespace,
    took_s: float,
) -> str:
    name = "CPU" if options.device == "cpu" else torch.cuda.get_device_name(0)
    num_ranks = dist.get_world_size()
    where = f"{num_ranks} x {name}"
    if options.device == "shared":
        where = f"{num_ranks} ranks that share {torch.cuda.device_count()} x {name}"
    command = f"torchrun --nproc_per_node {num_ranks} benchmarks/parity_gpu.py"
    if options.device != "cuda":
        command += f" --device {options.device}"
    if options.compile != COMPILES:
        command += f" --compile {' '.join(options.compile)}"
    lines = [
        f"# Parity of the stages on {where}",
        "",
        f"`{command}`, {took_s / 60:.0f} min, torch {torch.__version__}. What a cell is: see the script's first lines.",
        "",
        "| model | precision | compile | clip | checkpointing | bits of zero0 to zero3 | loss of step 20 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell, identical, loss in bits:
        switches = ("yes" if value else "no" for value in (cell.clip, cell.checkpointing))
        verdict = "equal" if identical else "DIFFERENT"
        values = [cell.model, cell.precision, cell.compile, *switches, verdict, f"{loss:.4f}"]
        lines.append("| " + " | ".join(values) + " |")
    if not losses:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"Losses over {NUM_LOSS_STEPS} steps as users train: the largest relative difference of a step's mean loss "
        "from DDP's. In fp16 all start from one loss scale, which overflows in step 1; steps that only one side skips "
        "are named below.",
        "",
        "| model | precision | " + " | ".join(STAGES) + " | allowed | DDP's loss | skipped by DDP | |",
        "| --- " * 10 + "|",
    ]
    for cell, found in losses:
        of_ddp = found["ddp"]
        values = [
            cell.model,
            cell.precision,
            *(f"{worst_loss(found[name], of_ddp):.1e}" for name in STAGES),
            f"{LOSS_TOLERANCES[cell.precision]:g}",
            f"{of_ddp.losses[0]:.3f} to {of_ddp.losses[-1]:.3f}",
            ", ".join(map(str, of_ddp.skipped)) or "none",
            "ok" if follows(cell, found) else "WRONG",
        ]
        lines.append("| " + " | ".join(values) + " |")
    alone = [(cell, sentence) for cell, found in losses for sentence in skipped_alone(found)]
    lines += ["", *(f"- {cell.model}, {cell.precision}: {sentence}." for cell, sentence in alone)] * bool(
        alone
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "shared", "cpu"), default="cuda")
    parser.add_argument("--compile", nargs="+", default=COMPILES, choices=COMPILES)
    parser.add_argument("--output", type=Path, help="written by rank 0; without it the table is printed")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device())
        )
    elif options.device == "shared":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("gloo")
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    began = time.monotonic()
    is_first = dist.get_rank() == 0
    bits, losses = [], []
    for cell in grid(options.compile):
        bits.append((cell, *judge_bits(cell, options.device)))
        if is_first:
            print(f"{time.monotonic() - began:6.1f} s", *bits[-1], file=sys.stderr, flush=True)
    for model in () if options.device == "shared" else MODELS:
        for precision in LOSS_TOLERANCES:
            cell = Cell(model, precision, "none", clip=True, checkpointing=False)
            losses.append((cell, courses(cell, options.device)))
            if is_first:
                verdict = "follows" if follows(*losses[-1]) else "WRONG"
                print(f"{time.monotonic() - began:6.1f} s", cell, verdict, file=sys.stderr, flush=True)
    text = markdown(bits, losses, options=options, took_s=time.monotonic() - began)
    if is_first and options.output:
        write_atomically(options.output, text.encode())
    elif is_first:
        print(text)
    dist.destroy_process_group()
    followed = all(follows(cell, found) for cell, found in losses)
    return 0 if all(identical for _, identical, _ in bits) and followed else 1


if __name__ == "__main__":
    sys.exit(main())
