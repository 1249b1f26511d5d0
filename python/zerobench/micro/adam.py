"""`bench adam`: the CPU Adam beside torch's fused AdamW, DeepSpeed's CPU Adam where it is installed, a memory stream
of the same mix, and triad.

torch is imported when measuring starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from zerobench.host.machine import memory_available_bytes
from zerobench.micro.adam_arrays import (
    ADAM,
    BETAS,
    CHECK_FACTOR,
    CHECK_STEPS,
    DEEPSPEED,
    EPS,
    LEARNING_RATE,
    MIXES,
    TORCH,
    WEIGHT_DECAY,
    AdamSizes,
    Arrays,
    Mix,
    deepspeed_step,
    differing_num,
    torch_step,
)
from zerobench.micro.checks import check_threads
from zerobench.micro.output import (
    MicroReport,
    OutputFile,
    TextTable,
    machine_line,
    new_progress,
    print_comment,
    print_table,
    ratio_cell,
    ratio_json,
)
from zerobench.micro.sampling import Call, as_json, calls_per_sample, rotated, seconds_per_call, speed_ratio
from zerobench.results.stats import Ratio, median
from zerobench.strategies.requirements import DEEPSPEED as DEEPSPEED_REQUIREMENT
from zerobench.strategies.requirements import (
    HOST_TOOLS,
    Tools,
    abandoned_build,
    gpu_capability,
    make_architectures_readable,
    missing_package,
)

MIX, TRIAD = "mix", "triad"
MIN_NUMEL, MAX_NUMEL = 1 << 19, 1 << 25
SAMPLE_S = 20e-3
# torch's OpenMP threads spin for some milliseconds after a region and would take a core from whoever comes next.
SETTLE_S = 5e-3
# Ours, torch's, DeepSpeed's, the copy that the check compares with, triad's third.
_BYTES_PER_ELEMENT = 16 + 4 + 16 + 4 + 16 + 4 + 14 + 12


@dataclass(frozen=True, kw_only=True)
class AdamOptions(AdamSizes):
    """Sizes and numbers of threads to measure."""

    thread_nums: Sequence[int]

    def check(self) -> None:
        for thread_num in self.thread_nums:
            check_threads(thread_num)
        super().check()


NOTES = (
    "Dtypes are those of the gradient and of the low-precision copy of the master; torch is AdamW(fused=True) on one "
    "flat fp32 tensor, plus the casts where a dtype is bf16; deepspeed is its CPU Adam with the same casts; mix is the "
    "same traffic with additions for arithmetic, triad is a = b + f c past the caches; ratios are medians of the "
    "ratios of each pair with their 95 % interval (of 6 pairs or more)"
)


def run_adam(options: AdamOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code: 1 where a result was wrong."""
    sizes = options.sizes_within(memory_available_bytes(), bytes_per_element=_BYTES_PER_ELEMENT, notes=notes)
    machine = machine_line()
    print_comment(console, machine)
    cases = list(itertools.product(options.thread_nums, sizes, MIXES))
    rows = []
    peer, why_not = deepspeed_peer()
    if why_not is not None:
        notes.print(f"without DeepSpeed's CPU Adam: {why_not}", style="dim", highlight=False)
    with new_progress(notes) as bar:
        task = bar.add_task("adam", total=len(cases) * (options.repeats + 1))

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what)

        for thread_num, numel, mix in cases:
            rows.append(measure(numel, mix, thread_num, options.repeats, tick, peer=peer))
    table = adam_table(rows)
    print_table(console, table)
    print_comment(console, NOTES)
    settings = {"repeats": options.repeats, "threads": list(options.thread_nums)}
    output.write(
        MicroReport(
            benchmark="adam", machine=machine, settings=settings, rows=rows, tables=[table], notes=NOTES
        )
    )
    return int(any(row["wrong"] for row in rows))


def adam_table(rows: Sequence[dict[str, Any]]) -> TextTable:
    table = TextTable(
        title=f"Adam, {rows[0]['isa']}",
        columns=(
            "dtypes", "elements", "threads", "time ms", "GB/s", "mix GB/s", "triad GB/s", "vs torch", "vs deepspeed",
            "of mix", "wrong"
        ),
    )  # fmt: skip
    for _, group in itertools.groupby(rows, key=lambda row: row["threads"]):
        table.sections.append([adam_cells(row) for row in group])
    return table


def adam_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["dtypes"],
        f"{row['numel']}",
        f"{row['threads']}",
        f"{row['time_ms'][ADAM]:.3f}",
        *(f"{row['gb_s'][side]:.2f}" for side in (ADAM, MIX, TRIAD)),
        *(
            ratio_cell(Ratio(**row[name]) if row[name] else None)
            for name in ("ratio_to_torch", "ratio_to_deepspeed", "ratio_to_mix")
        ),
        f"{row['wrong']}",
    ]


def deepspeed_peer(
    tools: Tools = HOST_TOOLS,
) -> tuple[Callable[[Arrays], Call] | None, str | None]:
    """Return what makes steps of DeepSpeed's CPU Adam, or why it cannot; compiles the operator."""
    missing = missing_package("deepspeed", DEEPSPEED_REQUIREMENT, tools=tools)
    why_not = missing or abandoned_build("its operator", "cpu_adam", tools=tools)
    if why_not is not None:
        return None, why_not
    make_architectures_readable(os.environ, capability=gpu_capability())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # which its log writes to ever after
            deepspeed_step(Arrays(64, MIXES[0]))()
    except (ImportError, RuntimeError) as error:
        return None, f"its operator could not be built: {error}"
    return deepspeed_step, None


def measure(
    numel: int,
    mix: Mix,
    thread_num: int,
    repeats: int,
    tick: Callable[[str], None],
    *,
    peer: Callable[[Arrays], Call] | None,
) -> dict[str, Any]:
    """`peer` makes the steps of DeepSpeed's CPU Adam."""
    import torch

    from zerobench import _native

    core = _native.load()
    torch.set_num_threads(thread_num)
    pool = core.ThreadPool(thread_num, cpus=core.allowed_cpus()[:thread_num])
    what = f"{thread_num} threads, {numel} elements, {mix.text}"
    tick(what)
    hyperparameters = core.AdamHyperparameters(
        lr=LEARNING_RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        decoupled=True,
    )
    ours = Arrays(numel, mix)
    wrong = wrong_num(core, ours, hyperparameters, pool)
    runner = ours.runner(core, hyperparameters)
    ours.fill()
    steps = itertools.count(1)
    other = torch.empty(numel).fill_(1.0)
    calls: dict[str, Call] = {
        ADAM: lambda: runner.step(pool, step=next(steps)),
        TORCH: torch_step(ours),
        MIX: lambda: runner.stream_mix(pool),
        TRIAD: lambda: core.stream_triad(ours.exp_avg, ours.exp_avg_sq, other, factor=0.5, pool=pool),
    }
    if peer is not None:
        calls[DEEPSPEED] = peer(ours)
    times_s = sample(calls, ours, repeats, lambda: tick(what))
    moved = {ADAM: runner.bytes_per_step, MIX: runner.bytes_per_step, TRIAD: 12 * numel}
    return {
        "numel": numel,
        "threads": thread_num,
        "dtypes": mix.text,
        "gradient_dtype": mix.gradient,
        "low_precision_dtype": mix.low_precision,
        "isa": core.best_isa(),
        "bytes_per_step": runner.bytes_per_step,
        "time_ms": {side: median(samples) * 1e3 for side, samples in times_s.items()},
        "gb_s": {side: moved[side] / median(times_s[side]) / 1e9 for side in moved},
        "ratio_to_torch": ratio_json(speed_ratio(times_s, ADAM, TORCH)),
        "ratio_to_deepspeed": ratio_json(
            speed_ratio(times_s, ADAM, DEEPSPEED) if DEEPSPEED in times_s else None
        ),
        "ratio_to_mix": ratio_json(speed_ratio(times_s, ADAM, MIX)),
        "ratio_to_triad": ratio_json(speed_ratio(times_s, ADAM, TRIAD, scale=moved[ADAM] / moved[TRIAD])),
        "wrong": wrong,
        "samples_us": as_json(times_s),
    }


def sample(
    calls: dict[str, Call], arrays: Arrays, repeats: int, tick: Callable[[], None]
) -> dict[str, list[float]]:
    call_nums = {}
    for name, call in calls.items():
        call()
        call_nums[name] = calls_per_sample(seconds_per_call(call, 1), SAMPLE_S)
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats):
        for name in rotated(list(calls), index):
            arrays.fill()  # the streams leave values of no meaning, and denormals would slow the next step
            time.sleep(SETTLE_S)
            calls[name]()  # or who works on the arrays that were just filled would find them in the caches
            times_s[name].append(seconds_per_call(calls[name], call_nums[name]))
        tick()
    return times_s


def wrong_num(core: Any, arrays: Arrays, hyperparameters: Any, pool: Any) -> int:
    """Elements whose bits differ from the scalar form's after some steps."""
    arrays.fill_hard()
    reference = arrays.copy()
    runner, scalar = arrays.runner(core, hyperparameters), reference.runner(core, hyperparameters)
    for step in range(1, CHECK_STEPS + 1):
        runner.step(pool, step=step, grad_factor=CHECK_FACTOR)
        scalar.step_as("scalar", step=step, grad_factor=CHECK_FACTOR)
    return differing_num(arrays, reference)
