"""Holds zero0 to zero3 against each other, bit for bit, and against ``single``, over the whole grid of settings.

``python benchmarks/parity_grid.py`` runs every cell on world sizes 1 to 4 and writes benchmarks/parity_grid.md.
tests/dist/test_parity.py runs a pairwise subset of the same cells.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2, 3, 4)
NUM_STEPS = 20
BATCH_SIZE = 1
SEQ_LENGTH = 24
OPTIMIZER = {"lr": 1e-3}
# fp16 arithmetic on CPUs is slow: below 50k parameters. fp32 runs `tiny` as it is.
SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_seq_length": SEQ_LENGTH}
QUANTITIES = ("loss", "norm", "gradient", "update", "piece", "optimizer", "evaluation", "reads")
MODELS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": SMALL, "fp16": SMALL}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of settings."""

    world_size: int
    precision: str
    clip: bool
    checkpointing: bool
    tied: bool
    grad_accum: int = 1


def full_grid() -> list[Cell]:
    """Every combination, and accumulation over 4 micro-batches for each world size and precision."""
    switches = (False, True)
    cells = [Cell(*values) for values in itertools.product(WORLD_SIZES, MODELS, switches, switches, switches)]
    return cells + [
        Cell(world_size, precision, clip=True, checkpointing=False, tied=True, grad_accum=4)
        for world_size, precision in itertools.product(WORLD_SIZES, MODELS)
    ]


def pairwise_subset() -> list[Cell]:
    """Each pair of values of any two settings at least once, in 12 cells; and three with accumulation."""
    cells = []
    for index, (world_size, precision) in enumerate(itertools.product(WORLD_SIZES, MODELS)):
        row, column = divmod(index, len(MODELS))
        bits = (row + column) % 2, (row // 2 + column) % 2, (row + row // 2 + column // 2) % 2
        cells.append(Cell(world_size, precision, *map(bool, bits)))
    return cells + [
        Cell(2, precision, clip=True, checkpointing=False, tied=True, grad_accum=4) for precision in MODELS
    ]


def run_cell(cell: Cell, *, rank: int, rendezvous: str) -> dict[str, dict[str, Any]]:
    """Train the cell at every stage on this rank; on rank 0 also the reference. Results by strategy name."""
    if rank >= cell.world_size:
        return {}
    results = {
        f"zero{stage}": train(f"zero{stage}", cell, rank=rank, rendezvous=rendezvous) for stage in STAGES
    }
    if rank == 0:
        reference = train("single", cell, rank=rank, rendezvous=rendezvous)
        for name in results:
            results[name]["deviation"] = deviations(results[name], reference, cell)
        results["single"] = reference
    for result in results.values():
        del result["evidence"], result["initial"]
    return results


@functools.cache
def text() -> Any:
    from zerobench.data import open_data

    return open_data("stdlib", seed=0, seq_length=SEQ_LENGTH, vocab_size=256)


def train(name: str, cell: Cell, *, rank: int, rendezvous: str) -> dict[str, Any]:
    from zerobench import models, strategies
    from zerobench.bench.rank.verify import evaluate_parameters, gather_evidence
    from zerobench.strategies.base import OptimizerSettings, StrategySettings
    from zerobench.strategies.shared import checksum

    alone = name == "single"
    world_size = 1 if alone else cell.world_size
    settings = StrategySettings(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        rendezvous=f"{rendezvous}-{cell}-{name}",
        precision=cell.precision,
        batch_size=BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        grad_accum=cell.grad_accum,
        clip=0.5 if cell.clip else None,
        checkpointing=cell.checkpointing,
        optimizer=OptimizerSettings(**OPTIMIZER),
        timeout_s=1800.0,  # ranks that smaller worlds leave out wait for the others here
        deterministic=True,
    )
    data = text()
    sizes = {"batch_size": BATCH_SIZE, "grad_accum": cell.grad_accum}

    def batches(step: int) -> Sequence[Any]:
        if alone:
            return data.global_micro_batches(step, world_size=cell.world_size, **sizes)
        return data.micro_batches(step, rank=rank, world_size=world_size, **sizes)

    config = models.resolve("tiny", MODELS[cell.precision] | {"tied_embeddings": cell.tied})
    strategy = strategies.get(name)(settings)
    build = functools.partial(models.build, config, 0)
    strategy.build(build)
    initial = strategy.full_parameters()
    held_out = data.validation_batches(
        rank=rank, world_size=world_size, batch_size=BATCH_SIZE, num_batches=1
    )[0]
    evidence = gather_evidence(strategy, batches, held_out=held_out)
    norms = []
    for step in range(NUM_STEPS):
        norms.append(strategy.step(batches(step), norm=True).grad_norm)
    result = {
        "checksum": checksum(strategy.full_parameters()),
        "norms": [float(norm) for norm in norms if norm is not None],
        "loss": evidence.loss,
        "read": evidence.read.share,
        "evidence": evidence,
        "initial": initial,
    }
    strategy.close()
    if not alone:
        (expected,) = evaluate_parameters(
            strategies.get("single"), settings, build, evidence.parameters, [held_out]
        )
        result["evaluation"] = abs(evidence.evaluation / expected - 1)
    return result


def deviations(result: dict[str, Any], reference: dict[str, Any], cell: Cell) -> dict[str, float]:
    """How far verification finds a stage from ``single``, all but the loss, which needs every rank's."""
    from zerobench.bench.rank.deviation import compare
    from zerobench.bench.rank.evidence import Reference
    from zerobench.strategies.base import OptimizerSettings

    found, expected = result["evidence"], reference["evidence"]
    updates = {
        name: parameter - reference["initial"][name] for name, parameter in expected.parameters.items()
    }
    deviation = compare(
        found,
        Reference(expected.gradients, updates, expected.parameters, expected.moments),
        precision=cell.precision,
        optimizer=OptimizerSettings(**OPTIMIZER),
    )
    return {
        "norm": abs(found.norm / expected.norm - 1),
        "gradient": deviation.gradient,
        "update": deviation.update,
        "piece": deviation.piece,
        "optimizer": deviation.optimizer,
        "evaluation": result["evaluation"],
    }


def judge(cell: Cell, by_rank: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Whether all stages and ranks ended with the same bits, and the largest deviations from ``single``."""
    from zerobench.bench.protocol.tolerances import TOLERANCES

    ranks = by_rank[: cell.world_size]
    names = [f"zero{stage}" for stage in STAGES]
    # With accumulation, stages 0 and 1 reduce sums and stages 2 and 3 sum reductions.
    alike = [names] if cell.grad_accum == 1 else [names[:2], names[2:]]
    identical = all(
        len({(rank[name]["checksum"], tuple(rank[name]["norms"])) for rank in ranks for name in group}) == 1
        for group in alike
    )
    worst = {
        key: max(ranks[0][name]["deviation"][key] for name in names)
        for key in QUANTITIES
        if key not in ("loss", "reads")  # which are every rank's
    }
    worst["reads"] = max(rank[name]["read"] for rank in ranks for name in names)
    reference_loss = ranks[0]["single"]["loss"]
    losses = (sum(rank[name]["loss"] for rank in ranks) / cell.world_size for name in names)
    worst["loss"] = max(abs(loss / reference_loss - 1) for loss in losses)
    tolerances = TOLERANCES[cell.precision]
    return {
        "cell": cell,
        "identical": identical,
        "deviation": worst,
        "ok": identical and all(worst[key] <= tolerances[key] for key in tolerances),
    }


def run_cells(
    rank: int, cells: Iterable[Cell], rendezvous: str, progress: Connection | None = None
) -> list[Any]:
    """Every cell on this rank, one after the other."""
    import torch

    torch.set_num_threads(1)
    results = []
    for cell in cells:
        results.append(run_cell(cell, rank=rank, rendezvous=rendezvous))
        if progress is not None:
            progress.send(results[-1])
    return results


def markdown(verdicts: Sequence[dict[str, Any]], *, took_s: float) -> str:
    import torch

    from zerobench import models
    from zerobench.bench.protocol.tolerances import TOLERANCES, nan_last

    numel = models.parameter_count(models.resolve("tiny", SMALL))
    lines = [
        "# Parity of the stages",
        "",
        f"{count_right(verdicts)} cells are right. Written by `python benchmarks/parity_grid.py` in "
        f"{took_s / 60:.0f} min on CPU, torch {torch.__version__}.",
        "",
        "A cell is a world size of 1 to 4 and a precision, with and without clipping, checkpointing and tied "
        "embeddings, and one of each with accumulation over 4 micro-batches. It trains zero0 to zero3 for "
        f"{NUM_STEPS} steps after the verification's own, on text, {BATCH_SIZE} sequence of {SEQ_LENGTH} a rank and "
        f"micro-batch. fp32 trains `tiny`; bf16 and fp16 train it with {SMALL['num_layers']} layers of "
        f"{SMALL['hidden_size']} ({numel:,} parameters where tied), since fp16 is slow on CPUs. *Bits equal*: "
        "parameters (SHA-256) and every step's gradient norm are the same at all four stages and on all ranks; with "
        "accumulation the same for zero0 and zero1, and for zero2 and zero3. The other columns are verification's "
        "largest deviations over cells and stages from `single` on the same global batch "
        "([verification.md](../docs/decisions/verification.md)), with what is allowed in brackets.",
        "",
        f"| precision | right | bits equal | {' | '.join(QUANTITIES)} |",
        "| --- " * (len(QUANTITIES) + 3) + "|",
    ]
    for precision in MODELS:
        found = [verdict for verdict in verdicts if verdict["cell"].precision == precision]
        equal = sum(verdict["identical"] for verdict in found)
        worst = {key: max((of["deviation"][key] for of in found), key=nan_last) for key in QUANTITIES}
        deviations = (f"{worst[key]:.1e} ({TOLERANCES[precision][key]:g})" for key in QUANTITIES)
        values = [precision, count_right(found), f"{equal} of {len(found)}", *deviations]
        lines.append("| " + " | ".join(values) + " |")
    wrong = [
        f"- {of['cell']}: bits {'equal' if of['identical'] else 'DIFFERENT'}, {of['deviation']}"
        for of in verdicts
        if not of["ok"]
    ]
    return "\n".join([*lines, *(["", "Wrong:", "", *wrong] if wrong else [])]) + "\n"


def count_right(verdicts: Sequence[dict[str, Any]]) -> str:
    return f"{sum(verdict['ok'] for verdict in verdicts)} of {len(verdicts)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--subset", action="store_true", help="only the cells that the tests run")
    options = parser.parse_args()
    cells = pairwise_subset() if options.subset else full_grid()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        readers = []
        for rank in range(max(WORLD_SIZES)):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=run_cells, args=(rank, cells, f"parity-{os.getpid()}", writer), daemon=True
            )
            process.start()
            stack.callback(process.kill)
            writer.close()
            readers.append(reader)
        verdicts = []
        for cell in cells:
            verdicts.append(judge(cell, [reader.recv() for reader in readers]))
            print(
                f"{len(verdicts)}/{len(cells)}",
                "ok" if verdicts[-1]["ok"] else "WRONG",
                cell,
                file=sys.stderr,
            )
    options.output.write_text(markdown(verdicts, took_s=time.monotonic() - began), encoding="utf-8")
    return 0 if all(verdict["ok"] for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
