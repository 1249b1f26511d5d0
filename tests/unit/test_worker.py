"""Work of one rank: settings, steps in order, dtypes, and which error it reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from comparison_samples import HOST, place, plan

from zerobench import data
from zerobench.bench.jobs import JobMaker
from zerobench.bench.protocol.channel import describe_error
from zerobench.bench.protocol.job import Job
from zerobench.bench.rank import worker
from zerobench.bench.rank.meters import CpuMeter
from zerobench.bench.schedule import Step, schedule
from zerobench.strategies.single import SingleStrategy

TINY = {"strategies": ("single",), "world_size": (1,), "num_layers": (1,), "hidden_size": (16,)}


def first_step(tmp_path, **options) -> tuple[JobMaker, Step]:
    chosen = plan(**options)
    return (
        JobMaker(
            options=chosen.options,
            scratch=tmp_path,
            data_digest=None,
            memory_available_bytes=HOST.memory_available_bytes,
        ),
        schedule(chosen)[0],
    )


def first_job(tmp_path, **options) -> Job:
    """Return the job of a row on CPU ranks."""
    jobs, step = first_step(tmp_path, **options)
    (job,) = jobs.passes(step, None)
    return job


@contextmanager
def unread_channel():
    with open(os.devnull, "wb") as nowhere:
        yield worker.Channel(nowhere.fileno(), device="cpu")


def test_the_reference_accumulates_what_all_ranks_train_on(tmp_path) -> None:
    jobs, step = first_step(
        tmp_path, strategies=("zero2",), world_size=(4,), grad_accum=(3,), host_memory_gib=10.0,
        offload=("cpu_optimizer",),
    )  # fmt: skip
    (job,) = jobs.passes(step, None)
    settings = worker.strategy_settings(job, place(world_size=4, local_world_size=2))
    assert (settings.grad_accum, settings.host_memory_bytes) == (3, 5 << 30)  # two ranks a host
    job = jobs.reference(step, jobs.verification_model(step))
    settings = worker.strategy_settings(job, place(), deterministic=True)
    assert (settings.grad_accum, settings.world_size, settings.deterministic) == (12, 1, True)
    assert (settings.offload, settings.host_memory_bytes) == ("none", None)
    # Alone on its host it has all cores, and takes as many as each of the ranks: sums are rounded by their order.
    job.settings.threads_per_rank = worker.cpus_usable() + 1
    assert worker.threads_of(job, place()) == job.settings.threads_per_rank


class Recording(SingleStrategy):
    """Keeps what it trains on, and where the window begins."""

    def __init__(self, settings) -> None:
        super().__init__(settings)
        calls.clear()

    def step(self, micro_batches, **options):
        calls.append(("step", [batch["input_ids"].tolist() for batch in micro_batches]))
        return super().step(micro_batches, **options)

    def reset_counters(self) -> None:
        calls.append(("window", []))
        super().reset_counters()

    def profiled_step(self, micro_batches):
        calls.append(("profile", [batch["input_ids"].tolist() for batch in micro_batches]))
        return super().profiled_step(micro_batches)


calls: list[tuple[str, list]] = []


def test_a_rank_warms_up_measures_and_profiles_on_steps_that_follow_each_other(tmp_path) -> None:
    job = first_job(tmp_path, **TINY, warmup_steps=2, num_steps=3)
    with unread_channel() as channel:
        window, _ = worker.measured(job, Recording, place(), channel, CpuMeter())
    kinds = [kind for kind, _ in calls]
    assert kinds == ["step"] * 2 + ["window"] + ["step"] * 3 + ["profile"] * job.profile_steps
    assert len(window.step_times_ms) == 3 and job.profile_steps
    dataset = data.open_data("synthetic", seed=0, seq_length=64, vocab_size=job.model["vocab_size"])
    trained = [batches for kind, batches in calls if kind != "window"]
    for step, batches in enumerate(trained):
        (expected,) = dataset.micro_batches(step, rank=0, world_size=1, batch_size=job.settings.batch_size)
        assert batches == [expected["input_ids"].tolist()], step


class Hoarding(SingleStrategy):
    """Says that it holds 2 GiB on the host."""

    def memory_bytes(self):
        return {**super().memory_bytes(), "host": {"master": 2 << 30}}


@pytest.mark.slow
def test_a_rank_holds_its_share_of_the_host_at_most(tmp_path) -> None:
    job = first_job(tmp_path, **TINY, warmup_steps=1, num_steps=1)
    job.settings.host_memory_gib = 1.0
    with (
        unread_channel() as channel,
        pytest.raises(MemoryError, match=r"--host-memory-gib leaves a rank 1\.00"),
    ):
        worker.measured(job, Hoarding, place(), channel, CpuMeter())


def test_rows_say_the_mode_that_fp32_products_run_in(tmp_path) -> None:
    def compute(precision: str, *, tf32: bool) -> str:
        job = first_job(tmp_path, strategies=("single",), precision=(precision,))
        job.settings.tf32 = tf32
        return worker.row_dtypes(SingleStrategy(worker.strategy_settings(job, place())), job).compute

    assert (compute("fp32", tf32=True), compute("fp32", tf32=False)) == ("tf32", "float32")
    assert compute("bf16", tf32=True) == "bfloat16"


class EndsBadly(SingleStrategy):
    def close(self) -> None:
        super().close()
        raise RuntimeError("of closing")


def test_what_went_wrong_first_is_what_a_rank_says(tmp_path) -> None:
    job = first_job(tmp_path, **TINY)
    settings, build = worker.strategy_settings(job, place()), worker.model_factory(job.model, 0)
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


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc")])
def test_memory_that_ran_out_without_a_word_has_a_reason(error) -> None:
    limited = describe_error(error, "load", device="cpu", rank_memory_bytes=round(0.01 * 2**30))
    assert limited.message == "the 0.01 GiB that --rank-memory-gib allows a rank are used up"
    assert limited.out_of_memory == "host"
    free = describe_error(error, "load", device="cpu", rank_memory_bytes=None)
    assert re.fullmatch(r"the host refused memory, with [\d.e+]+ GiB available", free.message)
    told = describe_error(MemoryError("of what"), "load", device="cpu", rank_memory_bytes=None)
    assert told.message == "of what"


@pytest.mark.slow
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
