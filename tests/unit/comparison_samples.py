"""Parts of a comparison without processes: a host, a launcher that answers by itself, and what ranks report."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from builders import make_window
from plan_samples import GPUS, HOST_BYTES, SMALL
from rich.console import Console

from zerobench.bench.execution import Execution
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.plan.configuration import Plan
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.protocol.job import Job, Report, TensorDeviation, Verification
from zerobench.bench.protocol.place import MachinePlace
from zerobench.bench.rank import worker
from zerobench.bench.sampler import Sampler
from zerobench.bench.surroundings import Surroundings
from zerobench.results.schema import RowDtypes

HOST = Surroundings(
    machine={"cpu": "of a test", "details": {}},
    versions={},
    command="zerobench compare",
    memory_available_bytes=lambda: HOST_BYTES,
)
TWO_GPUS = {"device": "cuda", "gpus": GPUS[:2], "precision": ("bf16",), "compile": ("block",)}
BF16 = RowDtypes(param="bfloat16", compute="bfloat16", reduce="bfloat16", master="float32", state="float32")
WORST = {"gradient_worst": "wte.weight", "piece_worst": "wte.weight", "optimizer_worst": "wte.weight"}
NONE_DIFFERS = {**WORST, "gradient": 0.0, "update": 0.0, "piece": 0.0, "optimizer": 0.0, "max_abs": 0.0}

Answer = Callable[[Job], Outcome]


class Answering(Launcher):
    """Answers jobs by a function, and keeps them."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self._answer = answer

    def run(self, job: Job, **_: object) -> Outcome:
        self.jobs.append(job)
        return self._answer(job)


def plan(**options) -> Plan:
    strategies = ("compute_only", "single", "zero1", "zero3")
    return make_plan(CompareOptions(**{**SMALL, "strategies": strategies, **options}))


def execution(found: Plan, launcher: Launcher, *, host: Surroundings = HOST) -> Execution:
    sampler = Sampler(launcher.scratch / "samples.jsonl")
    return Execution(found.options, host=host, launcher=launcher, sampler=sampler, data_digest=None)


def quiet_display() -> ProgressDisplay:
    return ProgressDisplay(Console(file=io.StringIO()), 1)


def place(*, world_size: int = 1, local_world_size: int = 1) -> worker.Place:
    """Return the place of rank 0 of that many."""
    return worker.Place(
        rank=0, world_size=world_size, local_rank=0, local_world_size=local_world_size, rendezvous="r",
        ports=("2", "3"), machine=MachinePlace.of_one_launcher(0, local_world_size),
    )  # fmt: skip


def verified(*, checksum: str = "c", **deviation: float) -> Verification:
    """Return what rank 0 of a row or a reference reports. Deviations are 0 where nothing is given."""
    found = TensorDeviation(**{**NONE_DIFFERS, **deviation})
    return Verification(loss=5.0, norm=1.0, checksum=checksum, deviation=found)


def ended_well(job: Job, *, checksum: str = "c", **figures) -> Outcome:
    """Return the reports of ranks that did all that ``job`` asks for."""
    report = Report(
        dtypes=BF16,
        verification=verified(checksum=checksum) if job.verify else None,
        window=make_window(**figures) if job.measure else None,
    )
    return Outcome(status="ok", reports=dict.fromkeys(range(job.num_ranks), report))


def log_of(launcher: Launcher) -> Path:
    return launcher.scratch / "row.log"
