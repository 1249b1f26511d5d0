"""The measured timeline of one training step with offloaded state: a picture, and a table of what overlaps what.

    python benchmarks/offload_timeline.py --offload cpu --picture step.png            ranks of its own, on CPUs
    torchrun --nproc_per_node 1 benchmarks/offload_timeline.py --offload cpu ...      on GPUs where torch sees some

Shown is rank 0's step after some others, from the beginning of its forward to that of the next one: updates of the step
before run under its forward. What the core does is recorded by itself (`Engine.record_timeline`), forward and backward
by hooks on the model, a GPU's work by torch.profiler. Picture and table are one measurement, of whatever the machine
was doing then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zerobench
from zerobench import models
from zerobench.bench.rank.intervals import (
    Interval,
    is_communication,
    is_transfer,
    length_within,
    merged,
    subtracted,
)
from zerobench.bench.rank.meters import device_profiler

WARMUP_STEPS = 4
RECORDED_STEPS = 3  # of which the last but one is shown
COMPUTE, COLLECTIVES, WAITS = "forward and backward", "collectives", "waits for updates"
ADAM, UPDATE_WAITS, READS, WRITES = "CPU Adam", "update thread waits", "disk reads", "disk writes"
GPU, NCCL, TO_HOST, TO_DEVICE = "GPU kernels", "NCCL", "copies to host", "copies to GPU"
ROWS = (COMPUTE, COLLECTIVES, WAITS, GPU, NCCL, TO_HOST, TO_DEVICE, ADAM, UPDATE_WAITS, READS, WRITES)
COLOURS = dict(
    zip(
        ROWS,
        ("#0072B2", "#E69F00", "#CC79A7", "#0072B2", "#E69F00", "#56B4E9", "#117733", "#009E73", "#B0B0B0",
         "#D55E00", "#882255"),
        strict=True,
    )
)  # fmt: skip
WORKS = (COMPUTE, COLLECTIVES, GPU, NCCL, TO_HOST, TO_DEVICE, ADAM, READS, WRITES)


@dataclass(frozen=True)
class Span:
    """Something that a row of the picture was busy with, in nanoseconds of perf_counter_ns."""

    row: str
    unit: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Recording:
    spans: list[Span]
    step: Interval
    update_cpu_ms: float  # of the update thread, a step


class Watch:
    """Hooks that note when units compute: forwards and backwards, recomputations apart."""

    def __init__(self, engine: zerobench.Engine) -> None:
        self.spans: list[Span] = []
        self._begun: dict[tuple[str, str], int] = {}
        modules = dict(engine.module.named_modules())
        for unit in engine.units():
            module = modules.get(unit["name"])
            if module is None or unit["is_root"]:
                continue
            name = unit["name"]
            module.register_forward_pre_hook(lambda *_, name=name: self._begin("forward", name))
            module.register_forward_hook(lambda *_, name=name: self._end("forward", name))
            module.register_full_backward_pre_hook(lambda *_, name=name: self._begin("backward", name))
            module.register_full_backward_hook(lambda *_, name=name: self._end("backward", name))

    def _begin(self, what: str, unit: str) -> None:
        self._begun[what, unit] = time.perf_counter_ns()

    def _end(self, what: str, unit: str) -> None:
        begin_ns = self._begun.pop((what, unit), None)
        if begin_ns is not None:
            self.spans.append(Span(COMPUTE, f"{what} {unit}", begin_ns, time.perf_counter_ns()))


def row_of(place: str, what: str) -> str:
    """The picture's row of what the core recorded."""
    if place == "disk":
        return READS if what == "read" else WRITES
    if place == "update thread":
        return ADAM if what == "adam" else UPDATE_WAITS
    return COLLECTIVES if place == "collectives" else WAITS


@contextmanager
def gpu_spans(found: list[Span], *, on: bool) -> Iterator[None]:
    """What the GPU did in the block, on the host's clock."""
    if not on:
        yield
        return
    offset_ns = time.time_ns() - time.perf_counter_ns()
    with device_profiler() as profiler:
        yield
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != torch.profiler.DeviceType.CUDA or event.duration_ns() <= 0:
            continue
        name = event.name()
        row = NCCL if is_communication(name) else GPU
        if is_transfer(name):
            row = TO_HOST if "DtoH" in name else TO_DEVICE
        begin_ns = event.start_ns() - offset_ns
        found.append(Span(row, name, begin_ns, begin_ns + event.duration_ns()))


def update_thread_cpu_s() -> float:
    """CPU time so far of the thread that runs updates, Adam's share on it included."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "zb-update":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


def record(place: dict[str, Any], options: argparse.Namespace) -> Recording:
    """Rank 0's step from the beginning of its forward to that of the next."""
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{place['local_rank']}" if on_gpu else "cpu"
    fields = {"num_layers": options.num_layers, "hidden_size": options.hidden_size}
    model = models.build(
        models.resolve(options.model, {key: value for key, value in fields.items() if value}),
        seed=0,
        device=device,
        checkpointing=options.checkpointing,
    )
    vocabulary = next(iter(model.parameters())).shape[0]
    engine = zerobench.initialize(model, config=place | config_of(options))
    watch = Watch(engine)
    batch = torch.randint(
        0,
        vocabulary,
        (options.batch_size, options.seq_length),
        generator=torch.Generator().manual_seed(place["rank"]),
    ).to(device)
    begins_ns: list[int] = []

    def step() -> None:
        begins_ns.append(time.perf_counter_ns())
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    for _ in range(WARMUP_STEPS):
        step()
    watch.spans.clear()
    on_device: list[Span] = []
    cpu_before_s = update_thread_cpu_s()
    with gpu_spans(on_device, on=on_gpu), engine.record_timeline() as recorded:
        for _ in range(RECORDED_STEPS):
            step()
        engine.full_optimizer_state("exp_avg")  # every update is over
        cpu_ms = (update_thread_cpu_s() - cpu_before_s) * 1e3
    spans = [
        Span(row_of(where, what), unit if where == "update thread" else f"{what} {unit}", begin_ns, end_ns)
        for where, what, unit, begin_ns, end_ns in recorded
    ]
    engine.close()
    return Recording(
        spans=[*watch.spans, *spans, *on_device],
        step=(begins_ns[-2], begins_ns[-1]),
        update_cpu_ms=cpu_ms / RECORDED_STEPS,
    )


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {"stage": options.stage, "precision": options.precision}
    if options.clip:
        config["gradient_clipping"] = options.clip
    if options.offload != "none":
        on_nvme = options.offload in ("nvme", "nvme_full")
        section: dict[str, Any] = {
            "device": "nvme" if on_nvme else "cpu",
            "chunk_numel": options.chunk_numel,
        }
        if on_nvme:
            section |= {"nvme_path": options.nvme_path, "io_allow_fallback": True}
            section |= {"io_block_bytes": options.block_bytes, "io_depth": options.io_depth}
        config["offload_optimizer"] = section
        if options.offload == "nvme_full":
            config["offload_param"] = {"device": "nvme"}
    return config


def inside(spans: list[Span], step: Interval) -> dict[str, list[Interval]]:
    """By row, when it was busy within the step, in milliseconds from its beginning."""
    rows: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        begin, end = max(span.begin_ns, step[0]), min(span.end_ns, step[1])
        if begin < end:
            rows[span.row].append(((begin - step[0]) / 1e6, (end - step[0]) / 1e6))
    busy = {row: merged(sorted(intervals)) for row, intervals in rows.items()}
    if COMPUTE in busy:  # the computing thread moves collectives and waits inside its hooks
        away = merged(sorted([*busy.get(COLLECTIVES, []), *busy.get(WAITS, [])]))
        busy[COMPUTE] = subtracted(busy[COMPUTE], away)
    return busy


def overlap_table(busy: dict[str, list[Interval]], step_ms: float) -> str:
    """What of each row's time lay under the others', and under nothing."""
    works = [row for row in WORKS if busy.get(row)]
    lines = [
        f"| of a step of {step_ms:.1f} ms | busy | alone | "
        + " | ".join(f"under {row}" for row in works)
        + " |",
        "| --- |" + " ---: |" * (len(works) + 2),
    ]
    for row in works:
        others = merged(sorted(interval for other in works if other != row for interval in busy[other]))
        total = sum(end - begin for begin, end in busy[row])
        alone = sum(end - begin for begin, end in subtracted(busy[row], others))
        under = [
            ""
            if other == row
            else f"{sum(length_within(busy[other], *interval) for interval in busy[row]):.1f} ms"
            for other in works
        ]
        lines.append(f"| {row} | {total:.1f} ms | {alone:.1f} ms | " + " | ".join(under) + " |")
    waits = [row for row in (WAITS, UPDATE_WAITS) if busy.get(row)]
    told = [f"{row} {sum(end - begin for begin, end in busy[row]):.1f} ms" for row in waits]
    return "\n".join(lines) + ("\n\nBeside these: " + ", ".join(told) + "." if told else "")


def draw(busy: dict[str, list[Interval]], step_ms: float, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in ROWS if busy.get(row)]
    figure = Figure(figsize=(11, 0.45 * len(rows) + 1.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        bars = [(begin, end - begin) for begin, end in busy[row]]
        axes.broken_barh(bars, (at - 0.36, 0.72), facecolors=COLOURS[row], linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, step_ms)
    axes.set_xlabel("ms since the step's forward began")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="x", color="#e3e3e3")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path)


def show(found: Recording, options: argparse.Namespace) -> None:
    step = found.step
    step_ms = (step[1] - step[0]) / 1e6
    busy = inside(found.spans, step)
    state = {
        "none": "on the device",
        "cpu": "on the host",
        "nvme": "in files",
        "nvme_full": "and parameters in files",
    }[options.offload]
    print(overlap_table(busy, step_ms))
    print(f"\nThe update thread took {found.update_cpu_ms:.1f} ms of CPU time a step.")
    if options.picture:
        title = f"{options.model}, stage {options.stage}, {options.ranks} ranks, {options.precision}, state {state}"
        draw(busy, step_ms, title, options.picture)


def run_rank(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    place = {
        "rank": rank,
        "world_size": options.ranks,
        "local_rank": rank,
        "local_world_size": options.ranks,
        "rendezvous": rendezvous,
    }
    found = record(place, options)
    if rank == 0:
        show(found, options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--offload", choices=("none", "cpu", "nvme", "nvme_full"), default="cpu")
    parser.add_argument("--nvme-path", help="a folder on the disk to use, with --offload nvme")
    parser.add_argument("--picture", type=Path, help="a PNG or SVG file")
    parser.add_argument("--ranks", type=int, default=2, help="of its own, on CPUs")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--chunk-numel", type=int, default=4 << 20)
    parser.add_argument("--block-bytes", type=int, default=1 << 18, help="of a request to the disk")
    parser.add_argument("--io-depth", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    if options.offload.startswith("nvme") and not options.nvme_path:
        parser.error("--offload nvme needs --nvme-path")
    if options.offload == "nvme_full" and options.stage != 3:
        parser.error("parameters in files are parted: add --stage 3")
    return options


def main() -> None:
    options = read_options()
    if "RANK" in os.environ:  # under torchrun
        options.ranks = int(os.environ["WORLD_SIZE"])
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found = record({name.lower(): int(os.environ[name]) for name in names}, options)
        if os.environ["RANK"] == "0":
            show(found, options)
        return
    rendezvous = uuid.uuid4().hex
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, rendezvous, options)) for rank in range(options.ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    raise SystemExit(max(rank.exitcode or 0 for rank in ranks))


if __name__ == "__main__":
    main()
