"""`bench adam` on a GPU: the CUDA Adam beside torch's fused AdamW and beside a copy of as many bytes.

Times are those of the device alone: it waits until all calls of a sample are put in. torch is imported when measuring
starts.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from zerobench.errors import Error
from zerobench.host.gpus import Gpu
from zerobench.micro.adam_arrays import (
    ADAM,
    BETAS,
    CHECK_FACTOR,
    CHECK_STEPS,
    EPS,
    LEARNING_RATE,
    MIXES,
    TORCH,
    WEIGHT_DECAY,
    AdamSizes,
    Arrays,
    Mix,
    differing_num,
    torch_step,
)
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
from zerobench.micro.sampling import Call, as_json, calls_per_sample, rotated, speed_ratio
from zerobench.results.stats import Ratio, median

COPY = "copy"
LANE = "compute"
MIN_GPU_NUMEL, MAX_GPU_NUMEL = 1 << 22, 1 << 28  # the smallest passes the caches
CHECK_NUMEL = 1 << 22  # the scalar form takes half a second for them
SAMPLE_S = 10e-3
MAX_CALLS = 100  # more would fill the queue of launches, and the host would wait for the device
MAX_SLEEP_S = 8.0
CYCLES_PER_S = 2e9  # no GPU is much faster, so that a sleep is not too short
GPU_MIXES = (*MIXES, Mix(gradient="bfloat16", low_precision="bfloat16", remainders=True))
_BYTES_PER_ELEMENT = 20 + 18 + 32  # ours, torch's, both sides of the copy

NOTES = (
    "Dtypes are those of the gradient and of the low-precision copy of the master; with remainders the copy is the "
    "master's upper half, and the lower one is beside it; times are of the device alone, by "
    "its events; torch is AdamW(fused=True) on one flat fp32 tensor, plus the casts where a dtype is bf16; copy is a "
    "copy within device memory that reads and writes as many bytes as the step; vs torch and of copy are medians of "
    "the ratios of each pair with their 95 % interval (of 6 pairs or more); wrong counts elements that differ from "
    f"the scalar form, over up to {CHECK_NUMEL} elements and {CHECK_STEPS} steps"
)


@dataclass(frozen=True, kw_only=True)
class AdamGpuOptions(AdamSizes):
    """Sizes to measure on the first GPU."""

    gpu: Gpu


def run_adam_gpu(options: AdamGpuOptions, *, output: OutputFile, console: Console, notes: Console) -> int:
    """Measure, show and write; the exit code: 1 where a result was wrong."""
    import torch

    from zerobench import _native

    cuda = _native.load_cuda()
    torch.cuda.set_device(options.gpu.index)
    device = cuda.make_device(options.gpu.index, on_out_of_memory=torch.cuda.empty_cache)
    free_bytes = torch.cuda.mem_get_info(options.gpu.index)[0]
    sizes = options.sizes_within(free_bytes, bytes_per_element=_BYTES_PER_ELEMENT, notes=notes)
    machine = machine_line([options.gpu])
    print_comment(console, machine)
    cases = list(itertools.product(sizes, GPU_MIXES))
    rows = []
    with new_progress(notes) as bar:
        task = bar.add_task("adam", total=len(cases) * (options.repeats + 1))

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what)

        for numel, mix in cases:
            rows.append(measure(cuda, device, numel, mix, options, tick))
            torch.cuda.empty_cache()
    table = adam_table(rows, options.gpu)
    print_table(console, table)
    print_comment(console, NOTES)
    output.write(
        MicroReport(
            benchmark="adam",
            machine=machine,
            gpus=[options.gpu],
            settings={"repeats": options.repeats, "device": "cuda"},
            rows=rows,
            tables=[table],
            notes=NOTES,
        )
    )
    return int(any(row["wrong"] for row in rows))


def adam_table(rows: Sequence[dict[str, Any]], gpu: Gpu) -> TextTable:
    table = TextTable(
        title=f"Adam, {gpu.name}",
        columns=("dtypes", "elements", "time ms", "GB/s", "copy GB/s", "vs torch", "of copy", "wrong"),
    )
    for _, group in itertools.groupby(rows, key=lambda row: row["numel"]):
        table.sections.append([adam_cells(row) for row in group])
    return table


def adam_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["dtypes"],
        f"{row['numel']}",
        f"{row['time_ms'][ADAM]:.3f}",
        *(f"{row['gb_s'][side]:.0f}" for side in (ADAM, COPY)),
        *(ratio_cell(Ratio(**row[name])) for name in ("ratio_to_torch", "ratio_to_copy")),
        f"{row['wrong']}",
    ]


class GpuArrays(Arrays):
    """On the device. With remainders ``master`` is what they were made from, and no step touches it."""

    def __init__(self, numel: int, mix: Mix) -> None:
        import torch

        super().__init__(numel, mix, device="cuda")
        self.remainder = torch.empty(numel, dtype=torch.int16, device="cuda") if mix.remainders else None

    def split_masters(self, cuda: Any, device: Any) -> None:
        if self.remainder is None or self.low_precision is None:
            return
        self.low_precision.copy_(self.master)
        device.synchronize()
        device.write_masters(LANE, adam_run(cuda, self, step=1), source=self.master.data_ptr())

    def join_masters(self, cuda: Any, device: Any) -> None:
        if self.remainder is not None:
            device.read_masters(LANE, adam_run(cuda, self, step=1), destination=self.master.data_ptr())
            device.synchronize()
            self.exp_avg_sq.abs_()  # whose signs were the remainders'


def measure(
    cuda: Any, device: Any, numel: int, mix: Mix, options: AdamGpuOptions, tick: Callable[[str], None]
) -> dict[str, Any]:
    import torch

    what = f"{numel} elements, {mix.text}"
    tick(what)
    wrong = wrong_num(cuda, device, min(numel, CHECK_NUMEL), mix)
    ours = GpuArrays(numel, mix)
    ours.split_masters(cuda, device)
    bytes_per_step = step_bytes(ours)
    source = torch.zeros(bytes_per_step // 2, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    calls: dict[str, Call] = {
        ADAM: adam_call(cuda, device, ours, step=1, factor=1.0),
        TORCH: torch_step(ours),
        COPY: lambda: destination.copy_(source),
    }
    times_s = sample(calls, options.repeats, lambda: tick(what))
    return {
        "numel": numel,
        "device": options.gpu.name,
        "dtypes": mix.text,
        "gradient_dtype": mix.gradient,
        "low_precision_dtype": mix.low_precision,
        "bytes_per_step": bytes_per_step,
        "time_ms": {side: median(samples) * 1e3 for side, samples in times_s.items()},
        "gb_s": {side: bytes_per_step / median(times_s[side]) / 1e9 for side in (ADAM, COPY)},
        "ratio_to_torch": ratio_json(speed_ratio(times_s, ADAM, TORCH)),
        "ratio_to_copy": ratio_json(speed_ratio(times_s, ADAM, COPY)),
        "wrong": wrong,
        "samples_us": as_json(times_s),
    }


def step_bytes(arrays: GpuArrays) -> int:
    """Return the bytes that a step reads and writes."""
    low_bytes = 0 if arrays.low_precision is None else arrays.low_precision.nbytes
    # The copy is the upper half of what remainders are the lower one of, so then it is read, too.
    if arrays.remainder is None:
        master_bytes = 2 * arrays.master.nbytes + low_bytes
    else:
        master_bytes = 2 * (arrays.remainder.nbytes + low_bytes)
    return master_bytes + 2 * (arrays.exp_avg.nbytes + arrays.exp_avg_sq.nbytes) + arrays.gradient.nbytes


def adam_run(cuda: Any, arrays: GpuArrays, *, step: int) -> Any:
    low, remainder = arrays.low_precision, arrays.remainder
    return cuda.AdamRun(
        master=arrays.master.data_ptr() if remainder is None else None,
        remainder=None if remainder is None else remainder.data_ptr(),
        exp_avg=arrays.exp_avg.data_ptr(),
        exp_avg_sq=arrays.exp_avg_sq.data_ptr(),
        gradient=arrays.gradient.data_ptr(),
        gradient_dtype=arrays.mix.gradient,
        low_precision=None if low is None else low.data_ptr(),
        low_precision_dtype=arrays.mix.low_precision or "float32",
        numel=arrays.master.numel(),
        step=step,
        lr=LEARNING_RATE,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        decoupled=True,
    )


def adam_call(cuda: Any, device: Any, arrays: GpuArrays, *, step: int, factor: float) -> Call:
    runs = [adam_run(cuda, arrays, step=step)]
    scalars = device.allocate(16, what="the scalars of a step")
    device.upload(scalars.address, struct.pack("<dfI", 1.0, factor, 0))

    def call() -> None:
        device.adam(LANE, runs, scalars=scalars.address)

    return call


def wrong_num(cuda: Any, device: Any, numel: int, mix: Mix) -> int:
    """Elements whose bits differ from the scalar form's after some steps."""
    from zerobench import _native

    core = _native.load()
    arrays, reference = GpuArrays(numel, mix), Arrays(numel, mix)
    for each in (arrays, reference):
        each.fill_hard()
    arrays.split_masters(cuda, device)
    hyperparameters = core.AdamHyperparameters(
        lr=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, decoupled=True
    )
    scalar = reference.runner(core, hyperparameters)
    for step in range(1, CHECK_STEPS + 1):
        adam_call(cuda, device, arrays, step=step, factor=CHECK_FACTOR)()
        device.synchronize()
        scalar.step_as("scalar", step=step, grad_factor=CHECK_FACTOR)
    arrays.join_masters(cuda, device)
    return differing_num(arrays, reference)


def sample(calls: dict[str, Call], repeats: int, tick: Callable[[], None]) -> dict[str, list[float]]:
    samplers = {name: Sampler(call) for name, call in calls.items()}
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(repeats):
        for name in rotated(list(calls), index):
            times_s[name].append(samplers[name].seconds_per_call())
        tick()
    return times_s


class Sampler:
    """Device time of one call, over as many as make a sample."""

    def __init__(self, call: Call) -> None:
        self._call, self._call_num, self._sleep_s = call, 1, 1e-3
        for _ in range(3):  # what is made at first use, and then a duration to go by
            call_s = self.seconds_per_call()
        self._call_num = min(MAX_CALLS, calls_per_sample(call_s, SAMPLE_S))
        self.seconds_per_call()

    def seconds_per_call(self) -> float:
        """The device sleeps until the host has put in all calls; where it awoke too early, all is done again."""
        import torch

        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._sleep_s * CYCLES_PER_S))
            begin.record()
            start = time.perf_counter()
            for _ in range(self._call_num):
                self._call()
            end.record()
            host_s = time.perf_counter() - start
            awoke_early = begin.query()
            end.synchronize()
            if not awoke_early:
                return begin.elapsed_time(end) * 1e-3 / self._call_num
            self._sleep_s = 2 * max(self._sleep_s, host_s)
            if self._sleep_s > MAX_SLEEP_S:
                raise Error(
                    f"{self._call_num} calls took the host {host_s:.1f} s, so the device cannot be timed alone"
                )
