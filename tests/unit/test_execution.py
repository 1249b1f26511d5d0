"""Processes that each step of a comparison starts, and values that it adds to a row, on GPUs and without."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import make_window
from comparison_samples import (
    BF16,
    HOST,
    TWO_GPUS,
    Answering,
    ended_well,
    execution,
    log_of,
    plan,
    quiet_display,
    verified,
)
from plan_samples import GPUS

from zerobench.bench.assess import apply_outcome, first_row
from zerobench.bench.launch.environments import environment_of
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.protocol.job import DeviceMemory, Report
from zerobench.bench.schedule import schedule


@pytest.fixture
def answering():
    """Open launchers that answer by a function; without one nothing may run."""
    opened = []

    def open_with(answer=None) -> Answering:
        opened.append(Answering(answer or pytest.fail))
        return opened[-1]

    yield open_with
    for launcher in opened:
        launcher.close()


def run_first(found, step, launcher):
    return found.verify_and_measure(step, log=log_of(launcher), track=quiet_display().task)


def test_verification_has_processes_of_its_own_on_gpus(answering) -> None:
    chosen = plan(**TWO_GPUS)
    floor, _, zero1, _ = schedule(chosen)
    jobs = execution(chosen, answering()).jobs
    first, second = jobs.passes(zero1, None)
    assert (first.verify, first.measure, second.verify, second.measure) == (True, False, False, True)
    assert environment_of(first)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment_of(second) == {"NCCL_NVLS_ENABLE": "0"}
    (only,) = jobs.passes(floor, None)
    assert (only.verify, only.measure, only.num_ranks) == (False, True, 2)


def test_one_process_does_both_on_cpu_ranks(answering) -> None:
    chosen = plan(strategies=("zero1",))
    (job,) = execution(chosen, answering()).jobs.passes(schedule(chosen)[0], None)
    assert job.verify and job.measure
    assert environment_of(job) == {"CUDA_VISIBLE_DEVICES": ""}


def test_the_reference_is_plain_and_alone(answering) -> None:
    chosen = plan(**TWO_GPUS)
    zero1 = schedule(chosen)[2]
    jobs = execution(chosen, answering()).jobs
    job = jobs.reference(zero1, jobs.verification_model(zero1))
    assert (job.strategy, job.settings.compile, job.num_ranks) == ("single", "none", 1)


def test_a_reference_file_goes_with_its_last_row(answering) -> None:
    chosen = plan(strategies=("zero1", "zero3"))
    steps = schedule(chosen)
    launcher = answering(ended_well)
    found = execution(chosen, launcher)
    for step in steps:
        run_first(found, step, launcher)
    reference, *rows = launcher.jobs
    file = launcher.scratch / f"{steps[0].group.name}.pt"
    assert [job.reference_file for job in (reference, *rows)] == [str(file)] * 3
    file.write_bytes(b"x")
    found.drop_reference(steps[-1].group)
    assert not file.exists()


def test_a_row_whose_verification_did_not_end_is_never_measured(answering) -> None:
    def answer(job) -> Outcome:
        return ended_well(job) if job.kind == "reference" else Outcome(status="failed", error="no")

    chosen, launcher = plan(**TWO_GPUS), answering(answer)
    row, was_started = run_first(execution(chosen, launcher), schedule(chosen)[2], launcher)
    assert (row.status, row.error, was_started) == ("failed", "no", True)
    asked = [(job.kind, job.verify, job.measure) for job in launcher.jobs]
    assert asked == [("reference", True, False), ("row", True, False)]


def test_a_row_whose_verification_is_wrong_is_never_measured(answering) -> None:
    def answer(job) -> Outcome:
        report = Report(dtypes=BF16, verification=verified(gradient=float(job.kind == "row")))
        return Outcome(status="ok", reports=dict.fromkeys(range(job.num_ranks), report))

    chosen, launcher = plan(**TWO_GPUS), answering(answer)
    row, _ = run_first(execution(chosen, launcher), schedule(chosen)[2], launcher)
    assert row.status == "wrong" and [job.measure for job in launcher.jobs] == [False, False]


def test_a_row_whose_reference_did_not_run_is_not_started(answering) -> None:
    chosen, launcher = plan(**TWO_GPUS), answering(lambda job: Outcome(status="failed", error="no"))
    row, was_started = run_first(execution(chosen, launcher), schedule(chosen)[2], launcher)
    assert [job.kind for job in launcher.jobs] == ["reference"] and not was_started
    assert row.status == "failed"
    assert row.error == "cannot be verified, since the reference did not run: failed: no"


def test_a_row_that_the_memory_left_by_then_does_not_hold_is_not_started(answering) -> None:
    chosen, launcher = plan(strategies=("zero0",)), answering(ended_well)
    available = HOST.memory_available_bytes()
    host = replace(HOST, memory_available_bytes=lambda: available)
    (step,), runs = schedule(chosen), execution(chosen, launcher, host=host)
    row, was_started = run_first(runs, step, launcher)
    assert row.status == "ok" and was_started
    available = 1 << 10
    row, was_started = run_first(runs, step, launcher)
    assert (row.status, row.oom_tier, was_started) == ("oom", "host", False)
    assert "the host has available" in (row.error or "")


def test_a_row_that_cannot_lock_its_memory_is_not_started(answering) -> None:
    chosen, launcher = plan(**TWO_GPUS), answering()
    host = replace(HOST, why_not_lockable=lambda configuration: f"{configuration.strategy} locks too much")
    row, was_started = run_first(execution(chosen, launcher, host=host), schedule(chosen)[2], launcher)
    assert (row.status, row.error, row.oom_tier) == ("oom", "zero1 locks too much", "host")
    assert not was_started


def test_a_row_that_is_too_large_is_not_started(answering) -> None:
    chosen, launcher = plan(strategies=("zero1",), rank_memory_gib=1e-4), answering()
    row, was_started = run_first(execution(chosen, launcher), schedule(chosen)[0], launcher)
    assert (row.status, row.oom_tier, was_started) == ("oom", "host", False)
    assert row.error is not None and "--rank-memory-gib allows" in row.error


@pytest.mark.parametrize(
    ("fitting", "asked", "tried", "why"),
    [
        (2, None, [4, 2], "since the reference of all would not fit"),
        (4, 2, [2], "as --verify-layers asks"),
        (0, None, [4, 2, 1], None),
    ],
)
def test_a_reference_without_room_is_tried_with_half_the_layers(
    answering, fitting, asked, tried, why
) -> None:
    def answer(job) -> Outcome:
        if job.verify_model["num_layers"] > fitting:
            return Outcome(status="oom", error="no room")
        return ended_well(job)

    chosen, launcher = plan(**TWO_GPUS, num_layers=(4,), verify_layers=asked), answering(answer)
    zero1, found = schedule(chosen)[2], execution(chosen, launcher)

    def reference():
        return found.reference_of(zero1, log=log_of(launcher), track=quiet_display().task)

    def layers() -> list[int]:
        return [job.verify_model["num_layers"] for job in launcher.jobs]

    first = reference()
    assert layers() == tried and first.model["num_layers"] == tried[-1]
    assert first.error == ("oom: no room" if why is None else None)
    assert why is None or (first.why_fewer_layers, first.loss) == (why, 5.0)
    assert reference() is first and layers() == tried


GPU = {
    "utilisation_pct": 95, "used_bytes": 900, "power_w": 600.0, "sm_clock_mhz": 1800, "memory_clock_mhz": 3000,
    "temperature_c": 55, "limited_by": [], "pids": [1], "shared": False,
}  # fmt: skip


def sample(time_s: float, **second) -> str:
    """Return a line of the sampler with two GPUs."""
    entry = {"time_s": time_s, "cpu_pct": 5.0, "host_used_bytes": 7, "gpus": [GPU, {**GPU, **second}]}
    return f"{json.dumps(entry)}\n"


def test_a_measured_row_gets_what_the_machine_did_meanwhile(answering) -> None:
    chosen, launcher = plan(**TWO_GPUS), answering()
    found = execution(chosen, launcher)
    single, zero1 = chosen.configurations[1], chosen.configurations[2]
    row = first_row(zero1, status="failed")
    memory = DeviceMemory(
        peak_bytes=300, allocated_bytes=200, torch_allocated_peak_bytes=250, torch_reserved_peak_bytes=260,
        outside_torch_bytes=50,
    )  # fmt: skip
    figures = {"began_s": 100.0, "ended_s": 101.0, "memory": memory, "compiled_graphs": 2.0}
    reports = {
        rank: Report(dtypes=BF16, window=make_window(**figures, energy_per_step_j=5.0 + 3.0 * rank))
        for rank in range(2)
    }
    lines = [sample(99.0 + at, used_bytes=1000 * at) for at in (0, 1.5, 1.9, 9)]
    samples = launcher.scratch / "samples.jsonl"
    samples.write_text("".join(lines) + '{"time_s": 1')
    windows = apply_outcome(row, Outcome(status="ok", reports=reports), zero1, None)
    found.add_machine_figures(row, windows)
    assert row.status == "ok" and row.compiled_graphs == 2.0
    assert (row.peak_device_bytes, row.outside_torch_bytes, row.torch_reserved_peak_bytes) == (300, 50, 260)
    assert row.sampled is not None and row.sampled.sample_num == 2
    assert row.sampled.gpu_utilisation_pct == 95 and row.device_used_peak_bytes == 1900
    assert row.device_utilisation_pct is None  # a second is too short for the driver's counter
    assert row.peak_device_pct == 100 * 300 / GPUS[0].total_bytes
    assert row.energy_per_step_j == 13.0
    assert row.tokens_per_j == 2 * row.settings.batch_size * 64 / 13.0
    assert row.sampled.power_cap_pct == 0.0
    assert row.sampled.shared_gpus == []
    # A repeat, in which another process used a GPU: its memory may be in the peaks.
    samples.write_text(sample(200.5, shared=True))
    found.add_machine_figures(row, [make_window(began_s=200.0, ended_s=201.0)])
    assert row.sampled.shared_gpus == [1] and row.sampled.sample_num == 2
    found.add_machine_figures(row, [make_window(began_s=300.0, ended_s=301.0)])
    assert row.sampled.shared_gpus == [1]
    assert row.mfu is not None and row.mfu.peak_of == "NVIDIA H200, bf16 dense"
    assert row.deviation is not None and row.deviation.verdict == "not verified: it trains nothing"
    samples.write_text("".join(lines) + '{"time_s": 1')
    alone = first_row(single, status="failed")
    windows = apply_outcome(alone, Outcome(status="ok", reports={0: reports[0]}), single, None)
    found.add_machine_figures(alone, windows)
    assert alone.device_used_peak_bytes == 900  # of the one GPU that it ran on
    assert alone.energy_per_step_j == 5.0


def test_the_drivers_counter_is_told_of_windows_of_two_seconds(answering) -> None:
    chosen, launcher = plan(**TWO_GPUS), answering()
    row = first_row(chosen.configurations[2], status="ok")
    (launcher.scratch / "samples.jsonl").write_text(sample(100.5) + sample(101.5, utilisation_pct=85))
    execution(chosen, launcher).add_machine_figures(row, [make_window(began_s=100.0, ended_s=102.0)])
    assert row.device_utilisation_pct == 92.5


def reading(time_s: float, others_s: float, **second) -> str:
    times = {"others_s": others_s, "own_s": 0.0, "cpu_num": 4}
    return f"{json.dumps({**json.loads(sample(time_s, **second)), 'cpu_times': times})}\n"


def marks(answering, *lines: str, windows: tuple[float, ...] = (100.0,)) -> list[str | None]:
    """Return a row's mark after each of its windows of one second."""
    chosen, launcher = plan(**TWO_GPUS), answering()
    found, row = execution(chosen, launcher), first_row(chosen.configurations[2], status="ok")
    (launcher.scratch / "samples.jsonl").write_text("".join(lines))
    marked = []
    for began_s in windows:
        found.add_machine_figures(row, [make_window(began_s=began_s, ended_s=began_s + 1.0)])
        marked.append(row.busy)
    return marked


def test_a_row_is_marked_by_what_others_used_around_its_window(answering) -> None:
    quiet, busy = (reading(99.5, 0.0), reading(101.5, 0.5)), (reading(99.5, 0.0), reading(101.5, 1.0))
    assert marks(answering, reading(90.5, -9.0), *quiet, reading(103.0, 9.0)) == [None]
    assert marks(answering, *busy) == ["other processes used 0.5 of 4 cores"]
    assert marks(answering) == [None]


def test_a_row_is_marked_by_a_gpu_that_another_process_used(answering) -> None:
    assert marks(answering, reading(100.5, 0.0, shared=True)) == ["other processes used GPU 1"]
    # In a window too short for a sample, by the next one.
    assert marks(answering, reading(101.2, 0.0, shared=True)) == ["other processes used GPU 1"]


def test_a_mark_of_one_repeat_stays(answering) -> None:
    readings = [reading(99.5, 0.0), reading(101.5, 1.0), reading(199.5, 1.0), reading(201.5, 1.0)]
    found = marks(answering, *readings, windows=(100.0, 200.0))
    assert found == ["other processes used 0.5 of 4 cores"] * 2


@pytest.mark.parametrize(("others_s", "mark"), [(0.5, None), (1.0, "other processes used 0.5 of 4 cores")])
def test_a_row_is_marked_by_what_others_used_in_a_pass(answering, others_s, mark) -> None:
    chosen = plan(**TWO_GPUS)
    launcher = answering(lambda job: ended_well(job, began_s=100.0, ended_s=101.0))
    found, row = execution(chosen, launcher), first_row(chosen.configurations[2], status="ok")
    (launcher.scratch / "samples.jsonl").write_text(reading(99.5, 0.0) + reading(101.5, others_s))
    found.measure_window(
        schedule(chosen)[2], row, steps_per_window=3, log=log_of(launcher), on_progress=lambda progress: None
    )
    assert row.busy == mark
