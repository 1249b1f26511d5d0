"""`bench adam`: the CPU Adam beside torch's fused AdamW, a memory stream of the same mix, and triad.

torch is imported when measuring starts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from zerobench.bench.machine import cpus_usable, memory_available_bytes
from zerobench.bench.micro.output import (
    MicroReport,
    OutputFile,
    TextTable,
    machine_line,
    new_progress,
    ratio_cell,
    ratio_json,
    size_text,
)
from zerobench.bench.micro.sampling import (
    Call,
    as_json,
    calls_per_sample,
    rotated,
    seconds_per_call,
    speed_ratio,
)
from zerobench.errors import ConfigError, Error
from zerobench.report.stats import Ratio, median

ADAM, TORCH, MIX, TRIAD = "adam", "torch", "mix", "triad"
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
CHECK_STEPS = 3
SAMPLE_S = 20e-3
# torch's OpenMP threads spin for some milliseconds after a region and would take a core from whoever comes next.
SETTLE_S = 5e-3
_BYTES_PER_ELEMENT = (
    16 + 4 + 16 + 4 + 14 + 12
)  # ours, torch's, the copy that the check compares with, triad's third


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Dtypes of one step."""

    gradient: str
    low_precision: str | None

    @property
    def text(self) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16", None: "none"}
        return f"{short[self.gradient]} / {short[self.low_precision]}"


MIXES = (
    Mix(gradient="float32", low_precision=None),
    Mix(gradient="float32", low_precision="bfloat16"),
    Mix(gradient="bfloat16", low_precision="bfloat16"),
)


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """What to measure. Each size is four times the one before it."""

    thread_nums: Sequence[int]
    min_numel: int
    max_numel: int
    repeats: int

    def check(self) -> None:
        for thread_num in self.thread_nums:
            if not 1 <= thread_num <= cpus_usable():
                raise ConfigError(
                    f"--threads {thread_num} is not possible: give 1 to {cpus_usable()}, the cores usable here"
                )
        if not 1 <= self.min_numel <= self.max_numel:
            raise ConfigError(
                f"--min-numel {self.min_numel} and --max-numel {self.max_numel} are no range: give 1 <= min <= max"
            )
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats} measures nothing: give at least 1")

    def sizes(self) -> tuple[list[int], list[int]]:
        """Those that fit into half of the memory that is free, and those that do not."""
        sizes = [self.min_numel]
        while sizes[-1] * 4 <= self.max_numel:
            sizes.append(sizes[-1] * 4)
        if sizes[-1] != self.max_numel:
            sizes.append(self.max_numel)
        most = memory_available_bytes() // 2 // _BYTES_PER_ELEMENT
        return [size for size in sizes if size <= most], [size for size in sizes if size > most]


NOTES = (
    "Dtypes are those of the gradient and of the low-precision copy of the master; torch is AdamW(fused=True) on one "
    "flat fp32 tensor, plus the casts where a dtype is bf16; mix is the same traffic with additions for arithmetic, "
    "triad is a = b + f c past the caches; vs torch and of mix are medians of the ratios of each pair with their 95 % "
    "interval"
)


def run_adam(options: AdamOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code: 1 where a result was wrong."""
    sizes, too_large = options.sizes()
    for size in too_large:
        needed = size_text(size * _BYTES_PER_ELEMENT)
        notes.print(
            f"left out: {size} elements need {needed}, more than half of the free memory", style="yellow"
        )
    if not sizes:
        raise Error(f"no size fits into memory: give --min-numel below {options.min_numel}")
    machine = machine_line()
    console.print(f"# {machine}", highlight=False, soft_wrap=True)
    cases = list(itertools.product(options.thread_nums, sizes, MIXES))
    rows = []
    with new_progress(notes) as bar:
        task = bar.add_task("adam", total=len(cases) * (options.repeats + 1))

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what)

        for thread_num, numel, mix in cases:
            rows.append(measure(numel, mix, thread_num, options.repeats, tick))
    table = adam_table(rows)
    console.print(table)
    console.print(f"# {NOTES}", highlight=False, soft_wrap=True)
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
            "dtypes", "elements", "threads", "time ms", "GB/s", "mix GB/s", "triad GB/s", "vs torch", "of mix", "wrong"
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
        *(ratio_cell(Ratio(**row[name])) for name in ("ratio_to_torch", "ratio_to_mix")),
        f"{row['wrong']}",
    ]


def measure(
    numel: int, mix: Mix, thread_num: int, repeats: int, tick: Callable[[str], None]
) -> dict[str, Any]:
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
            times_s[name].append(seconds_per_call(calls[name], call_nums[name]))
        tick()
    return times_s


class Arrays:
    """One flat shard: what a step reads and writes."""

    def __init__(self, numel: int, mix: Mix) -> None:
        import torch

        self.mix = mix
        self.master, self.exp_avg, self.exp_avg_sq = (torch.empty(numel) for _ in range(3))
        self.gradient = torch.empty(numel, dtype=getattr(torch, mix.gradient))
        self.low_precision = (
            None if mix.low_precision is None else torch.empty(numel, dtype=getattr(torch, mix.low_precision))
        )
        self.fill()

    def fill(self) -> None:
        """Ordinary values that many steps and streams keep ordinary."""
        for tensor, value in (
            (self.master, 0.5),
            (self.exp_avg, 1e-3),
            (self.exp_avg_sq, 1e-4),
            (self.gradient, 1e-3),
            (self.low_precision, 0.5),
        ):
            if tensor is not None:
                tensor.fill_(value)

    def fill_hard(self) -> None:
        """Random magnitudes with denormals, infinities, NaN and zeros among them."""
        import torch

        generator = torch.Generator().manual_seed(0)
        numel = self.master.numel()
        for tensor in (self.master, self.exp_avg, self.exp_avg_sq, self.gradient):
            values = torch.randn(numel, generator=generator)
            for offset, special in enumerate((0.0, -0.0, 1e-40, 3e38, float("inf"), float("nan"), 1e-20)):
                values[offset * 13 :: 997] = special
            tensor.copy_(values.abs_() if tensor is self.exp_avg_sq else values)

    def copy(self) -> Arrays:
        """Outputs of their own; the gradient, which a step leaves as it is, is shared."""
        result = object.__new__(Arrays)
        result.mix, result.gradient = self.mix, self.gradient
        result.master, result.exp_avg, result.exp_avg_sq = (
            tensor.clone() for tensor in (self.master, self.exp_avg, self.exp_avg_sq)
        )
        result.low_precision = None if self.low_precision is None else self.low_precision.clone()
        return result

    def runner(self, core: Any, hyperparameters: Any) -> Any:
        return core.AdamRunner(
            master=self.master,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            gradient=self.gradient,
            low_precision=self.low_precision,
            hyperparameters=hyperparameters,
        )

    def outputs(self) -> Iterator[Any]:
        yield from (self.master, self.exp_avg, self.exp_avg_sq)
        if self.low_precision is not None:
            yield self.low_precision


def wrong_num(core: Any, arrays: Arrays, hyperparameters: Any, pool: Any) -> int:
    """Elements whose bits differ from the scalar form's after some steps; any NaN equals any NaN."""
    import torch

    arrays.fill_hard()
    reference = arrays.copy()
    runner, scalar = arrays.runner(core, hyperparameters), reference.runner(core, hyperparameters)
    for step in range(1, CHECK_STEPS + 1):
        runner.step(pool, step=step, grad_factor=0.37)
        scalar.step_as("scalar", step=step, grad_factor=0.37)
    wrong = 0
    for actual, expected in zip(arrays.outputs(), reference.outputs(), strict=True):
        words = torch.int32 if actual.dtype == torch.float32 else torch.int16
        differs = actual.view(words) != expected.view(words)
        wrong += int((differs & ~(actual.isnan() & expected.isnan())).sum())
    return wrong


def torch_step(arrays: Arrays) -> Call:
    """torch's step with the same inputs and outputs: casts are part of it where a dtype is not float32."""
    import torch

    parameter = torch.nn.Parameter(arrays.master.clone())
    parameter.grad = arrays.gradient.float() if arrays.mix.gradient != "float32" else arrays.gradient
    optimizer = torch.optim.AdamW(
        [parameter], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    gradient, low_precision = arrays.gradient, arrays.low_precision
    low_copy = None if low_precision is None else torch.empty_like(low_precision)

    def step() -> None:
        if parameter.grad is not gradient:
            parameter.grad.copy_(gradient)  # type: ignore[union-attr]
        optimizer.step()
        if low_copy is not None:
            low_copy.copy_(parameter.detach())

    return step
