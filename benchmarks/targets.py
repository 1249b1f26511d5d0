"""Holds results of ``zerobench compare`` on GPUs against the targets of this project, each file by itself:

    python benchmarks/targets.py RESULTS... [--output FILE.md]

RESULTS are output folders of ``compare``, or their results.json. A target is a ratio of one of our rows and the fastest
of others in the same file. Rows are found by model, batch, sequence length, precision and compile mode, so any number
of GPUs and any set of rows will do; the targets themselves were set for four H200. Exit status: 0 when all that could
be judged are met, 1 when one is missed, 2 when nothing could be judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zerobench.report import read_results
from zerobench.results.files import write_atomically
from zerobench.results.rows import step_rate
from zerobench.results.schema import Results, Row
from zerobench.results.stats import ratio_error
from zerobench.strategies.catalogue import FLOOR

DDP = ("ddp", "ddp_compress", "ddp_master")
DDP_AUTOCAST = ("ddp", "ddp_compress")  # as its users have it, with fp32 parameters
FSDP2 = ("fsdp2", "fsdp2_keep")
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3_leaves")
MEGATRON = ("mfsdp1", "mfsdp2", "mfsdp3")
DEEPCOMPILE = ("deepcompile3", "deepcompile3_prefetch", "deepcompile3_selective", "deepcompile3_both")
PEERS = (*DDP, *FSDP2, *DEEPSPEED, *MEGATRON)
COMPILED_PEERS = (*PEERS, *DEEPCOMPILE)
EAGER, BLOCK, COMPILED = ("none",), ("block",), ("block", "whole")
SHARDING = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Workload:
    model: str
    batch_size: int
    seq_length: int
    precision: str = "bf16"

    def __str__(self) -> str:
        return f"{self.model}, {self.batch_size}x{self.seq_length}, {self.precision}"

    def holds(self, row: Row) -> bool:
        found = row.settings
        return (found.model, found.batch_size, found.seq_length, found.precision) == (
            self.model,
            self.batch_size,
            self.seq_length,
            self.precision,
        ) and (found.grad_accum, found.offload, found.checkpointing) == (1, "none", False)


@dataclass(frozen=True)
class Target:
    """Our row's rate over the best of the others', or (``memory``) the others' smallest peak over ours."""

    workload: Workload
    ours: str
    beside: tuple[str, ...]
    at_least: float
    modes: tuple[str, ...] = EAGER
    beside_modes: tuple[str, ...] | None = None  # where not `modes`
    of: Literal["rate", "memory"] = "rate"


LLAMA = Workload("llama-1.3b", 4, 2048)
GPT2 = Workload("openai-community/gpt2", 32, 128)
GPT2_LONG = Workload("openai-community/gpt2", 16, 1024)
TARGETS = (
    *(Target(LLAMA, stage, PEERS, 1.05) for stage in SHARDING),
    *(Target(LLAMA, stage, (FLOOR,), 0.95) for stage in SHARDING),
    Target(LLAMA, "zero3", ("fsdp2",), 1.0, of="memory"),
    *(Target(LLAMA, stage, FSDP2, 1.08, BLOCK, COMPILED) for stage in SHARDING),
    *(Target(LLAMA, stage, DEEPCOMPILE, 1.3, BLOCK, COMPILED) for stage in SHARDING),
    *(Target(LLAMA, stage, (FLOOR,), 0.93, BLOCK) for stage in SHARDING),
    *(Target(GPT2, stage, DDP, 1.25) for stage in ("zero1", "zero2")),
    *(Target(GPT2, stage, DDP_AUTOCAST, 1.25) for stage in ("zero1", "zero2")),
    Target(GPT2, "zero3", FSDP2, 1.5),
    Target(GPT2, "zero3", ("deepspeed3",), 4.0),
    Target(GPT2, "zero1", COMPILED_PEERS, 1.4, COMPILED),
    *(Target(GPT2_LONG, stage, PEERS, 1.0) for stage in SHARDING),
    Target(GPT2_LONG, "zero1", COMPILED_PEERS, 1.0, COMPILED),
)


@dataclass(frozen=True)
class Judgement:
    target: Target
    ours: Row
    beside: Row  # the best of those that the target names
    ratio: float
    error: float | None  # standard error of the ratio, from the samples of both rows

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.target.at_least


def value(row: Row, of: str) -> float | None:
    """Larger is better."""
    if of == "rate":
        return step_rate(row)
    return 1 / row.peak_device_bytes if row.peak_device_bytes else None


def best(
    rows: Iterable[Row], target: Target, strategies: Sequence[str], modes: Sequence[str]
) -> tuple[float, Row] | None:
    found = [
        (known, row)
        for row in rows
        if row.status == "ok" and row.strategy in strategies and row.settings.compile in modes
        if target.workload.holds(row) and (known := value(row, target.of)) is not None
    ]
    return max(found, key=lambda pair: pair[0], default=None)


def judge(results: Results, target: Target) -> Judgement | None:
    """None where the file lacks a side that is ok."""
    ours = best(results.rows, target, (target.ours,), target.modes)
    if ours is None:
        return None
    world_size = ours[1].settings.world_size
    others = [row for row in results.rows if row.settings.world_size == world_size]
    modes = target.beside_modes or target.modes
    if target.beside == (FLOOR,):
        modes = (ours[1].settings.compile,)
    beside = best(others, target, target.beside, modes)
    if beside is None:
        return None
    error = None
    if target.of == "rate" and ours[1].step_time_ms and beside[1].step_time_ms:
        error = ratio_error(beside[1].step_time_ms.samples, ours[1].step_time_ms.samples)
    return Judgement(target, ours[1], beside[1], ours[0] / beside[0], error)


def missing(results: Results, target: Target) -> list[str]:
    """Strategies that the target is judged without, and why."""
    modes = target.beside_modes or target.modes
    found = {strategy: "no row" for strategy in target.beside}
    for row in results.rows:
        if row.strategy in found and row.settings.compile in modes and target.workload.holds(row):
            found[row.strategy] = "ok" if "ok" in (row.status, found[row.strategy]) else row.status
    return [f"{strategy} ({why})" for strategy, why in found.items() if why != "ok"]


def described(row: Row, of: str) -> str:
    mode = "" if row.settings.compile == "none" else f" by {row.settings.compile}"
    if of == "memory":
        return f"{row.strategy}{mode} ({(row.peak_device_bytes or 0) / 2**30:.1f} GiB)"
    return f"{row.strategy}{mode} ({row.step_time_ms.median if row.step_time_ms else 0.0:.1f} ms)"


def table(results: Results, judgements: Sequence[Judgement]) -> str:
    gpus = sorted({judgement.ours.settings.world_size for judgement in judgements})
    lines = [
        f"{', '.join(map(str, gpus))} GPUs, {results.created}: `{results.command}`",
        "",
        "| workload | ours | beside | ratio | at least | | judged without |",
        "| --- | --- | --- | --: | --: | --- | --- |",
    ]
    for found in judgements:
        target = found.target
        error = "" if found.error is None else f" ± {found.error:.3f}"
        what = "smaller peak, " if target.of == "memory" else ""
        lines.append(
            f"| {target.workload} | {described(found.ours, target.of)} | {what}{described(found.beside, target.of)} | "
            f"{found.ratio:.3f}{error} | {target.at_least:g} | {'met' if found.is_met else 'missed'} | "
            f"{', '.join(missing(results, target))} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="a Markdown file; without it the tables are printed")
    options = parser.parse_args(arguments)
    judged: list[Judgement] = []
    tables = []
    for path in options.results:
        results = read_results(path)
        found = [known for target in TARGETS if (known := judge(results, target)) is not None]
        if found:
            tables.append(table(results, found))
        judged += found
    covered = {found.target for found in judged}
    open_num = sum(target not in covered for target in TARGETS)
    if open_num:
        print(f"{open_num} of {len(TARGETS)} targets have no rows in these files", file=sys.stderr)
    text = "\n".join(tables)
    if options.output and judged:
        write_atomically(options.output, text.encode())
    elif judged:
        print(text)
    if not judged:
        return 2
    return 0 if all(found.is_met for found in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
