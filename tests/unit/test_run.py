"""What a comparison asks of its ranks, and what it adds to a row, on GPUs and without."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from zerobench import data
from zerobench.bench.assess import ReferenceRun, apply_outcome, apply_windows, first_row
from zerobench.bench.launch.environments import environment_of
from zerobench.bench.launch.launcher import Launcher
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.output import OutputFolder
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.progress import ProgressDisplay
from zerobench.bench.protocol.channel import describe_error
from zerobench.bench.protocol.job import DeviceMemory, Report, TensorDeviation, Verification, Window
from zerobench.bench.rank import worker
from zerobench.bench.rank.meters import CpuMeter
from zerobench.bench.run import Comparison
from zerobench.errors import DataError
from zerobench.host.gpus import Gpu
from zerobench.results.schema import Deviation, RowDtypes
from zerobench.strategies.single import SingleStrategy

GPUS = tuple(
    Gpu(index=index, name="NVIDIA H200", uuid=str(index), total_bytes=140 << 30, compute_capability=(9, 0))
    for index in range(2)
)
BF16 = RowDtypes(param="bfloat16", compute="bfloat16", reduce="bfloat16", master="float32", state="float32")


@pytest.fixture
def comparison(tmp_path):
    with Launcher() as launcher:

        def of(**options) -> Comparison:
            chosen = {
                "data": "synthetic", "seq_length": (64,), "strategies": ("compute_only", "single", "zero1", "zero3"),
                "device": "cuda", "gpus": GPUS, "precision": ("bf16",), "compile": ("block",), **options,
            }  # fmt: skip
            return Comparison(make_plan(CompareOptions(**chosen)), OutputFolder(tmp_path / "out"), launcher)

        yield of


def quiet(found: Comparison) -> ProgressDisplay:
    return ProgressDisplay(Console(file=io.StringIO()), found.work())


def test_verification_has_processes_of_its_own_on_gpus(comparison) -> None:
    found = comparison()
    configurations = {c.strategy: c for c in found.plan.configurations}
    first, second = found.passes(configurations["zero1"], None)
    assert (first.verify, first.measure, second.verify, second.measure) == (True, False, False, True)
    assert environment_of(first)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment_of(second) == {"NCCL_NVLS_ENABLE": "0"}
    (floor,) = found.passes(configurations["compute_only"], None)
    assert (floor.verify, floor.measure, floor.num_ranks) == (False, True, len(GPUS))


def test_one_process_does_both_on_cpu_ranks(comparison) -> None:
    found = comparison(device="cpu", gpus=(), strategies=("zero1",))
    (job,) = found.passes(found.plan.configurations[0], None)
    assert job.verify and job.measure
    assert environment_of(job) == {"CUDA_VISIBLE_DEVICES": ""}


def test_the_reference_is_plain_and_serves_all_that_train_the_same(comparison) -> None:
    found = comparison()
    floor, single, zero1, zero3 = found.plan.configurations
    assert not found.needs_reference(floor)
    # `single` runs on other global batches than two ranks do, and is its own reference.
    assert not found.needs_reference(single)
    assert found.needs_reference(zero1) and zero1.reference_group() == zero3.reference_group()
    job = found.reference_job(zero1, found.verification_model(zero1))
    assert (job.strategy, job.settings.compile, job.num_ranks) == ("single", "none", 1)
    assert found.work() == 4 + 1


def test_the_reference_accumulates_what_all_ranks_train_on(comparison, monkeypatch) -> None:
    found = comparison(
        device="cpu", gpus=(), strategies=("zero2",), world_size=(4,), grad_accum=(3,), host_memory_gib=10.0,
        offload=("cpu_optimizer",),
    )  # fmt: skip
    (row,) = found.plan.configurations
    monkeypatch.setenv("MASTER_PORT", "1")  # set anew by each pass

    def place(world_size: int, local_world_size: int) -> worker.Place:
        return worker.Place(
            rank=0, world_size=world_size, local_rank=0, local_world_size=local_world_size, rendezvous="r",
            ports=("2", "3"),
        )  # fmt: skip

    (job,) = found.passes(row, None)
    settings = worker.strategy_settings(job, place(4, 2))
    assert (settings.grad_accum, settings.host_memory_bytes) == (3, 5 << 30)  # two ranks a host
    job = found.reference_job(row, found.verification_model(row))
    settings = worker.strategy_settings(job, place(1, 1), deterministic=True)
    assert (settings.grad_accum, settings.world_size, settings.deterministic) == (12, 1, True)
    assert (settings.offload, settings.host_memory_bytes) == ("none", None)
    # Alone on its host it has all cores, and takes as many as each of the ranks: sums are rounded by their order.
    job.settings.threads_per_rank = worker.cpus_usable() + 1
    assert worker.threads_of(job, place(1, 1)) == job.settings.threads_per_rank


def test_ranks_train_on_the_bytes_that_the_comparison_began_with(comparison, tmp_path, monkeypatch) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a" * 1000)
    found = comparison(device="cpu", gpus=(), strategies=("zero1",), data=str(text))
    monkeypatch.setattr(
        found, "make_row", lambda configuration, display: first_row(configuration, status="ok")
    )
    found.run(quiet(found))
    monkeypatch.setenv("MASTER_PORT", "1")
    place = worker.Place(
        rank=0, world_size=1, local_rank=0, local_world_size=1, rendezvous="r", ports=("2", "3")
    )
    (row,) = found.plan.configurations
    jobs = [*found.passes(row, None), found.reference_job(row, found.verification_model(row))]
    for job in jobs:
        worker.open_batches(job, worker.strategy_settings(job, place), job.model)
    text.write_bytes(b"b" * 1000)
    for job in jobs:
        with pytest.raises(DataError, match="does not hold the bytes that the comparison began with"):
            worker.open_batches(job, worker.strategy_settings(job, place), job.model)


def test_a_rank_warms_up_measures_and_profiles_on_steps_that_follow_each_other(
    comparison, monkeypatch
) -> None:
    found = comparison(
        device="cpu", gpus=(), strategies=("single",), world_size=(1,), num_layers=(1,), hidden_size=(16,),
        warmup_steps=2, num_steps=3,
    )  # fmt: skip
    (job,) = found.passes(found.plan.configurations[0], None)
    monkeypatch.setenv("MASTER_PORT", "1")
    place = worker.Place(
        rank=0, world_size=1, local_rank=0, local_world_size=1, rendezvous="r", ports=("2", "3")
    )
    given = {}

    def measured(strategy, **arguments):
        given.update(arguments)
        return window()

    monkeypatch.setattr(worker.measure, "measure", measured)
    with open(os.devnull, "wb") as nowhere:
        channel = worker.Channel(nowhere.fileno(), device="cpu")
        worker.measured(job, SingleStrategy, place, channel, CpuMeter())
    vocab_size = found.plan.configurations[0].model["vocab_size"]
    dataset = data.open_data("synthetic", seed=0, seq_length=64, vocab_size=vocab_size)
    steps = [*given["warmup"], *given["window"], *given["profile"]]
    assert (len(given["warmup"]), len(given["window"])) == (2, 3) and given["profile"]
    for step, batches in enumerate(steps):
        (expected,) = dataset.micro_batches(step, rank=0, world_size=1, batch_size=job.settings.batch_size)
        assert [batch["input_ids"].tolist() for batch in batches] == [expected["input_ids"].tolist()], step
    # What a rank then holds on the host is its share of --host-memory-gib at most.
    job.settings.host_memory_gib = 1.0
    monkeypatch.setattr(
        worker.measure, "measure", lambda *_, **__: window(memory_bytes={"host": {"master": 2 << 30}})
    )
    with (
        open(os.devnull, "wb") as nowhere,
        pytest.raises(MemoryError, match=r"--host-memory-gib leaves a rank 1\.00"),
    ):
        worker.measured(
            job, SingleStrategy, place, worker.Channel(nowhere.fileno(), device="cpu"), CpuMeter()
        )


def test_rows_say_the_mode_that_fp32_products_run_in(comparison, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    place = worker.Place(
        rank=0, world_size=1, local_rank=0, local_world_size=1, rendezvous="r", ports=("2", "3")
    )

    def compute(precision: str, *, tf32: bool) -> str:
        found = comparison(device="cpu", gpus=(), strategies=("single",), precision=(precision,))
        (job,) = found.passes(found.plan.configurations[0], None)
        job.settings.tf32 = tf32
        return worker.row_dtypes(SingleStrategy(worker.strategy_settings(job, place)), job).compute

    assert (compute("fp32", tf32=True), compute("fp32", tf32=False)) == ("tf32", "float32")
    assert compute("bf16", tf32=True) == "bfloat16"


def test_a_reference_file_goes_with_its_last_row(comparison, tmp_path) -> None:
    found = comparison()
    _, _, zero1, zero3 = found.plan.configurations
    file = tmp_path / "reference.pt"
    file.write_bytes(b"x")
    found.references[zero1.reference_group()] = ReferenceRun(model={}, file=str(file))
    found.drop_reference(zero1.reference_group(), later=[zero3])
    assert file.exists()
    found.drop_reference(zero3.reference_group(), later=[])
    assert not file.exists()


def test_a_tie_of_checksums_is_undone_by_the_rows_that_follow(comparison, monkeypatch) -> None:
    found = comparison(device="cpu", gpus=(), strategies=("zero0", "zero1", "zero2", "zero3"), repeats=2)
    repeated, seen = [], []

    def make_row(configuration, display):
        checksum = "odd" if configuration.strategy == "zero1" else "even"
        deviation = Deviation(checksum_group="g")
        return first_row(configuration, status="ok", checksum=checksum, deviation=deviation, tokens_per_s=1.0)

    def run(job, **_):
        repeated.append(job.strategy)
        return Outcome(status="failed", error="no") if job.strategy == "zero2" else Outcome(status="oom")

    monkeypatch.setattr(found, "make_row", make_row)
    monkeypatch.setattr(found.launcher, "run", run)
    monkeypatch.setattr(
        found.output, "write_results", lambda results: seen.append([row.status for row in results.rows])
    )
    found.run(quiet(found))
    assert seen[1:5] == [["ok"], ["wrong"] * 2, ["ok", "wrong", "ok"], ["ok", "wrong", "ok", "ok"]]
    assert repeated == ["zero0", "zero2", "zero3"]  # nothing is measured again of what is wrong
    assert seen[-1] == ["oom", "wrong", "failed", "oom"]


def test_a_row_whose_verification_did_not_end_is_never_measured(comparison, monkeypatch) -> None:
    found = comparison()
    zero1 = found.plan.configurations[2]
    group, asked = zero1.reference_group(), []

    def run(job, **_):
        asked.append((job.kind, job.verify, job.measure))
        return Outcome(status="failed", error="no")

    monkeypatch.setattr(found.launcher, "run", run)
    found.references[group] = ReferenceRun(model=zero1.model, file="f", loss=1.0)
    row = found.make_row(zero1, quiet(found))
    assert (row.status, row.error, asked) == ("failed", "no", [("row", True, False)])
    del found.references[group]
    row = found.make_row(zero1, quiet(found))
    assert asked[1:] == [("reference", True, False)]
    assert row.status == "failed"
    assert row.error == "cannot be verified, since the reference did not run: failed: no"
    monkeypatch.setattr("zerobench.bench.run.why_not_lockable", lambda *_, **__: "no memory to lock")
    row = found.make_row(zero1, quiet(found))
    assert (row.status, row.error, row.oom_tier) == ("oom", "no memory to lock", "host")
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("fitting", "asked", "tried", "why"),
    [
        (2, None, [4, 2], "since the reference of all would not fit"),
        (4, 2, [2], "as --verify-layers asks"),
        (0, None, [4, 2, 1], None),
    ],
)
def test_a_reference_without_room_is_tried_with_half_the_layers(
    comparison, monkeypatch, fitting, asked, tried, why
) -> None:
    found = comparison(num_layers=(4,), verify_layers=asked)
    zero1, layers = found.plan.configurations[2], []

    def run(job, **_):
        layers.append(job.verify_model["num_layers"])
        if layers[-1] > fitting:
            return Outcome(status="oom", error="no room")
        return Outcome(
            status="ok", reports={0: Report(dtypes=BF16, verification=Verification(loss=5.0, norm=1.0))}
        )

    monkeypatch.setattr(found.launcher, "run", run)
    reference = found.reference_of(zero1, quiet(found))
    assert layers == tried and reference.model["num_layers"] == tried[-1]
    assert reference.error == ("oom: no room" if why is None else None)
    assert why is None or (reference.why_fewer_layers, reference.loss) == (why, 5.0)
    assert found.reference_of(zero1, quiet(found)) is reference and layers == tried


def test_a_repeat_adds_its_samples_or_takes_all_figures_away(comparison, monkeypatch) -> None:
    found = comparison(device="cpu", gpus=(), strategies=("zero0", "zero1", "zero2"), repeats=2)

    def make_row(configuration, display):
        row = first_row(configuration, status="ok", checksum="c", deviation=Deviation(checksum_group="g"))
        apply_windows(row, [window()] * 2)
        return row

    def run(job, **_):
        assert job.measure and not job.verify
        if job.strategy == "zero2":
            return Outcome(status="oom", error="no memory", oom_tier="host")
        losses = [2.0, math.nan] if job.strategy == "zero1" else [2.0, 1.0]
        repeated = window(step_times_ms=[30.0, 30.0], losses=losses)
        return Outcome(status="ok", reports={rank: Report(dtypes=BF16, window=repeated) for rank in range(2)})

    monkeypatch.setattr(found, "make_row", make_row)
    monkeypatch.setattr(found.launcher, "run", run)
    found.run(quiet(found))
    zero0, zero1, zero2 = found.results.rows
    assert zero0.status == "ok" and zero0.step_time_ms is not None
    assert zero0.step_time_ms.samples == [10.0, 10.0, 30.0, 30.0]
    assert zero1.status == "failed"
    assert (zero1.error or "").startswith("repeat 2: the loss of measured step 2 is not finite")
    assert (zero2.status, zero2.error, zero2.oom_tier) == ("oom", "repeat 2: no memory", "host")
    for row in (zero1, zero2):
        assert row.step_time_ms is row.tokens_per_s is row.peak_device_bytes is row.loss is None
    assert found.results.complete


def window(**figures) -> Window:
    values = {
        "step_times_ms": [10.0, 10.0], "losses": [2.0, 1.0], "began_s": 100.0, "ended_s": 101.0,
        "validation_loss": 1.5, "peak_host_bytes": 1, "communication_bytes": {}, "memory_bytes": {},
        "phases_ms": {}, "compiled_graphs": 2.0, "threads": 1,
        "memory": DeviceMemory(
            peak_bytes=300, allocated_bytes=200, torch_allocated_peak_bytes=250, torch_reserved_peak_bytes=260,
            outside_torch_bytes=50,
        ),
    }  # fmt: skip
    return Window(**{**values, **figures})


def test_a_measured_row_gets_what_the_machine_did_meanwhile(comparison) -> None:
    found = comparison()
    single, zero1 = found.plan.configurations[1], found.plan.configurations[2]
    row = first_row(zero1, status="failed")
    reports = {
        rank: Report(dtypes=BF16, window=window(energy_per_step_j=5.0 + 3.0 * rank)) for rank in range(2)
    }
    gpu = {
        "utilisation_pct": 95, "used_bytes": 900, "power_w": 600.0, "sm_clock_mhz": 1800, "memory_clock_mhz": 3000,
        "temperature_c": 55, "limited_by": [], "pids": [1], "shared": False,
    }  # fmt: skip
    samples = [
        {
            "time_s": 99.0 + at,
            "cpu_pct": 5.0,
            "host_used_bytes": 7,
            "gpus": [gpu, {**gpu, "used_bytes": 1000 * at}],
        }
        for at in (0, 1.5, 1.9, 9)
    ]
    found.sampler.path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples) + '{"time_s": 1')
    windows = apply_outcome(row, Outcome(status="ok", reports=reports), zero1, None)
    found.add_machine_figures(row, windows)
    assert row.status == "ok" and row.compiled_graphs == 2.0
    assert (row.peak_device_bytes, row.outside_torch_bytes, row.torch_reserved_peak_bytes) == (300, 50, 260)
    assert row.sampled is not None and row.sampled.sample_num == 2
    assert (row.device_utilisation_pct, row.device_used_peak_bytes) == (95, 1900)
    assert row.energy_per_step_j == 13.0
    assert row.tokens_per_j == 2 * row.settings.batch_size * 64 / 13.0
    assert row.sampled.power_cap_pct == 0.0
    assert row.sampled.shared_gpus == []
    # A repeat, in which another process used a GPU: its memory may be in the peaks.
    shared = {"time_s": 200.5, "cpu_pct": 5.0, "host_used_bytes": 7, "gpus": [gpu, {**gpu, "shared": True}]}
    found.sampler.path.write_text(f"{json.dumps(shared)}\n")
    found.add_machine_figures(row, [window(began_s=200.0, ended_s=201.0)])
    assert row.sampled.shared_gpus == [1] and row.sampled.sample_num == 2
    found.add_machine_figures(row, [window(began_s=300.0, ended_s=301.0)])
    assert row.sampled.shared_gpus == [1]
    found.sampler.path.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples) + '{"time_s": 1')
    assert row.mfu is not None and row.mfu.peak_of == "NVIDIA H200, bf16 dense"
    assert row.deviation is not None and row.deviation.verdict == "not verified: it trains nothing"
    alone = first_row(single, status="failed")
    windows = apply_outcome(alone, Outcome(status="ok", reports={0: reports[0]}), single, None)
    found.add_machine_figures(alone, windows)
    assert alone.device_used_peak_bytes == 900  # of the one GPU that it ran on
    assert alone.energy_per_step_j == 5.0


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"losses": [2.0, math.nan]}, "the loss of measured step 2 is not finite"),
        ({"validation_loss": math.inf}, "the held-out loss after the measured steps is not finite"),
        ({"compiled_graphs": 0.0}, "ran nothing of it compiled"),
        ({"applied_steps": 0, "skipped_steps": 3}, "skipped the updates of 3 of the last 3 steps"),
        # Of two measured steps and the one before: perhaps that one alone was applied, or one of the two.
        ({"applied_steps": 1, "skipped_steps": 2}, "skipped the updates of 2 of the last 3 steps"),
        ({"applied_steps": 2, "skipped_steps": 1}, "skipped the updates of 1 of the last 3 steps"),
    ],
)
def test_figures_that_are_none_of_the_rows_are_not_shown(comparison, figures, said) -> None:
    configuration = comparison().plan.configurations[2]
    row = first_row(configuration, status="failed")
    reports = {0: Report(dtypes=BF16, window=window()), 1: Report(dtypes=BF16, window=window(**figures))}
    if not figures.keys() & {"losses", "validation_loss"}:  # all ranks show the same
        reports[0] = reports[1]
    assert apply_outcome(row, Outcome(status="ok", reports=reports), configuration, None) == []
    assert row.status == "failed" and said in (row.error or "") and row.step_time_ms is None


def test_a_row_that_skips_the_updates_of_few_steps_is_shown_and_says_how_many(comparison) -> None:
    configuration = comparison().plan.configurations[2]
    row = first_row(configuration, status="failed")
    shown = window(step_times_ms=[10.0] * 3, losses=[1.0] * 3, applied_steps=3, skipped_steps=1)
    reports = {rank: Report(dtypes=BF16, window=shown) for rank in range(2)}
    assert apply_outcome(row, Outcome(status="ok", reports=reports), configuration, None) == [shown, shown]
    assert (row.status, row.error, row.skipped_steps) == ("ok", None, 1)


@pytest.mark.parametrize("quantity", ["gradient", "update", "piece", "optimizer"])
def test_a_row_that_is_measured_and_wrong_has_no_figures(comparison, quantity) -> None:
    configuration = comparison().plan.configurations[2]
    deviation = dict.fromkeys(("gradient", "update", "piece", "optimizer", "max_abs"), 0.0) | {quantity: 1.0}
    deviation |= dict.fromkeys(("gradient_worst", "piece_worst", "optimizer_worst"), "wte.weight")
    verifications = [
        Verification(loss=5.0, norm=1.0, checksum="c", deviation=TensorDeviation(**deviation)),
        Verification(loss=5.0, norm=1.0),
    ]
    reports = {
        rank: Report(dtypes=BF16, verification=verification, window=window())
        for rank, verification in enumerate(verifications)
    }
    row = first_row(configuration, status="failed")
    reference = ReferenceRun(model=configuration.model, file="f", loss=5.0, norm=1.0)
    assert apply_outcome(row, Outcome(status="ok", reports=reports), configuration, reference) == []
    place = "" if quantity == "update" else " of wte.weight"
    assert row.status == "wrong" and f"{quantity}{place} deviates by 1 " in (row.error or "")
    assert row.step_time_ms is row.tokens_per_s is row.peak_device_bytes is row.loss is None


def test_energy_that_one_rank_does_not_know_is_null(comparison) -> None:
    configuration = comparison().plan.configurations[2]
    for unknown in (None, 0.0):
        row = first_row(configuration, status="failed")
        energies = (5.0, None) if unknown is None else (unknown, unknown)
        reports = {
            rank: Report(dtypes=BF16, window=window(energy_per_step_j=energy_j))
            for rank, energy_j in enumerate(energies)
        }
        apply_outcome(row, Outcome(status="ok", reports=reports), configuration, None)
        assert row.status == "ok" and row.energy_per_step_j is None and row.tokens_per_j is None


def test_memory_that_ran_out_says_whose(comparison) -> None:
    found = comparison()
    row = first_row(found.plan.configurations[2], status="failed")
    outcome = Outcome(status="oom", error="rank 0: OutOfMemoryError: no", oom_tier="device")
    assert apply_outcome(row, outcome, found.plan.configurations[2], None) == []
    assert (row.status, row.oom_tier) == ("oom", "device")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc")])
def test_memory_that_ran_out_without_a_word_has_a_reason(error) -> None:
    limited = describe_error(error, "load", device="cpu", rank_memory_bytes=round(0.01 * 2**30))
    assert limited.message == "the 0.01 GiB that --rank-memory-gib allows a rank are used up"
    assert limited.out_of_memory == "host"
    free = describe_error(error, "load", device="cpu", rank_memory_bytes=None)
    assert re.fullmatch(r"the host refused memory, with [\d.e+]+ GiB available", free.message)
    told = describe_error(MemoryError("of what"), "load", device="cpu", rank_memory_bytes=None)
    assert told.message == "of what"


def test_a_thread_for_whose_stack_a_limit_leaves_no_room_is_memory_that_ran_out() -> None:
    code = (
        "import resource, threading\n"
        "from zerobench.bench.protocol.channel import describe_error\n"
        "from zerobench.host.processes import vm_data_bytes\n"
        "def tier(error, limit): return describe_error(error, 'load', device='cpu', rank_memory_bytes=limit)\n"
        "before = tier(RuntimeError('of a shape'), 1 << 20)\n"
        "limit = vm_data_bytes() + (1 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "try:\n    threading.Thread(target=print).start()\n"
        "except RuntimeError as error:\n    refused, unlimited = tier(error, 1 << 20), tier(error, None)\n"
        "other = tier(ValueError('of a value'), 1 << 20)\n"
        "print([each.out_of_memory for each in (before, refused, unlimited, other)])\n"
        "print(refused.message)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    tiers, message = result.stdout.splitlines()
    assert tiers == "[None, 'host', None, None]"
    assert message.endswith("(the 0.000977 GiB that --rank-memory-gib allows a rank are used up)")


class EndsBadly(SingleStrategy):
    def close(self) -> None:
        super().close()
        raise RuntimeError("of closing")


def test_what_went_wrong_first_is_what_a_rank_says(comparison, monkeypatch) -> None:
    found = comparison(device="cpu", gpus=(), strategies=("single",), num_layers=(1,), hidden_size=(16,))
    (job,) = found.passes(found.plan.configurations[0], None)
    monkeypatch.setenv("MASTER_PORT", "1")
    place = worker.Place(
        rank=0, world_size=1, local_rank=0, local_world_size=1, rendezvous="r", ports=("2", "3")
    )
    settings, build = worker.strategy_settings(job, place), worker.model_factory(job.model, 0)
    read, write = os.pipe()
    with open(read, "rb") as told, open(write, "wb") as pipe:
        channel = worker.Channel(pipe.fileno(), device="cpu")
        for step in range(3):
            channel.tick("measurement", step)  # at most two a second
        with (
            pytest.raises(ValueError, match="of a step"),
            worker.open_strategy(EndsBadly, settings, build, channel, CpuMeter()),
        ):
            raise ValueError("of a step")
        channel.fail(RuntimeError("of the peers"))
        with (
            pytest.raises(RuntimeError, match="of closing"),
            worker.open_strategy(EndsBadly, settings, build, channel, CpuMeter()),
        ):
            pass
        pipe.close()
        progress, error = map(json.loads, told)
    assert progress == {"kind": "progress", "body": {"phase": "measurement", "step": 0}}
    assert (error["kind"], error["body"]["type"], error["body"]["message"]) == (
        "error",
        "ValueError",
        "of a step",
    )


def test_results_say_what_ranks_were_told(comparison) -> None:
    machine = comparison().results.machine
    assert machine["details"]["rank_environment"] == {"NCCL_NVLS_ENABLE": "0"}
    assert [gpu["name"] for gpu in machine["gpus"]] == ["NVIDIA H200"] * 2


def test_ctrl_c_while_rows_are_judged_shows_those_that_were(comparison, monkeypatch) -> None:
    found = comparison(device="cpu", gpus=(), strategies=("zero0", "zero1"))

    def finish_rows(results, baseline) -> None:
        if len(results.rows) == 2:
            raise KeyboardInterrupt

    def make_row(configuration, display):
        return first_row(
            configuration,
            status="ok",
            checksum=configuration.strategy,
            deviation=Deviation(checksum_group="g"),
        )

    monkeypatch.setattr("zerobench.bench.run.finish_rows", finish_rows)
    monkeypatch.setattr(found, "make_row", make_row)
    with pytest.raises(KeyboardInterrupt):
        found.run(quiet(found))
    assert [row.strategy for row in found.results.rows] == ["zero0"]
