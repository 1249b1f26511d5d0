"""The measured window, and how ranks' figures become a row's."""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import weakref
from functools import partial

import pytest
import torch
from builders import make_settings, make_window, tiny_model

from zerobench import data, strategies
from zerobench.bench import assess
from zerobench.bench.protocol.job import DeviceMemory, Window, WindowTransfers
from zerobench.bench.rank import measure
from zerobench.bench.rank.intervals import Activity
from zerobench.bench.rank.meters import CpuMeter, Meter, read_profile
from zerobench.bench.rank.worker import Channel
from zerobench.results.schema import Row, Settings
from zerobench.strategies.single import SingleStrategy

SEQ_LENGTH = 16


@pytest.fixture
def strategy():
    single = SingleStrategy(make_settings(seq_length=SEQ_LENGTH))
    single.build(partial(tiny_model, num_layers=1, hidden_size=16))
    yield single
    single.close()


def batches(num_steps: int):
    dataset = data.open_data("synthetic", seed=0, seq_length=SEQ_LENGTH, vocab_size=256)
    return [dataset.micro_batches(step, rank=0, world_size=1, batch_size=2) for step in range(num_steps)]


@pytest.fixture
def meter() -> CpuMeter:
    return CpuMeter()


def test_the_window_times_every_step_and_keeps_every_loss(strategy, meter) -> None:
    ticks = []
    times_ms, losses = measure.timed_window(
        strategy, batches(4), meter, lambda phase, step: ticks.append((phase, step))
    )
    assert len(times_ms) == len(losses) == 4
    assert all(time_ms > 0 for time_ms in times_ms)
    assert all(4 < float(loss) < 7 for loss in losses)  # about ln 256 at first
    assert ticks == [("measurement", step) for step in (1, 2, 3, 4)]


def test_the_collector_searches_only_what_the_window_makes(strategy, meter) -> None:
    class Node:
        pass

    def cycle() -> weakref.ref[Node]:
        node = Node()
        node.itself = node
        return weakref.ref(node)

    frozen_before = gc.get_freeze_count()
    old = cycle()
    with measure.only_new_garbage():
        assert old() is None
        assert gc.get_freeze_count() > frozen_before and gc.isenabled()
        made = cycle()
        gc.collect()
        assert made() is None
    assert gc.get_freeze_count() == 0


def test_a_message_in_a_window_is_rare_and_the_first_comes_before_it(strategy, meter) -> None:
    read, write = os.pipe()
    channel = Channel(write, device="cpu")
    for step in range(1000):
        channel.tick("measurement", step)
    os.close(write)
    with os.fdopen(read) as pipe:
        steps = [json.loads(line)["body"]["step"] for line in pipe]
    assert steps[0] == 0 and len(steps) < 5

    ticks: list[tuple[str, int]] = []
    steps = batches(4)
    measure.measure(
        strategy, meter=meter, warmup=steps[:1], window=steps[1:3], validation=[], profile=steps[3:],
        tick=lambda phase, step: ticks.append((phase, step)),
    )  # fmt: skip
    assert ticks[:3] == [("measurement", 0), ("measurement", 1), ("measurement", 2)]


class CountingMeter(CpuMeter):
    """Whose device takes 2 J in each step that it trains, and much before."""

    def __init__(self, strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.steps_done = 0
        train = strategy.step
        strategy.step = lambda batches: (setattr(self, "steps_done", self.steps_done + 1), train(batches))[1]

    def energy_j(self) -> float:
        return 1000.0 + 2.0 * self.steps_done


@pytest.mark.parametrize(("warmup_num", "energy_j"), [(0, 2.0), (1, None), (3, 2.0)])
def test_energy_is_counted_over_whole_steps(strategy, warmup_num, energy_j) -> None:
    steps = batches(warmup_num + 4)
    window = measure.measure(
        strategy, meter=CountingMeter(strategy), warmup=steps[:warmup_num], window=steps[warmup_num:],
        validation=[], profile=[], tick=lambda phase, step: None,
    )  # fmt: skip
    assert window.energy_per_step_j == energy_j


def test_phases_come_from_a_pass_of_their_own(strategy, meter) -> None:
    profile = meter.profile(strategy, batches(3), lambda phase, step: None)
    assert {"forward", "backward", "optimizer"} <= profile.phases_ms.keys()
    assert all(value >= 0 for value in profile.phases_ms.values())
    assert profile.busy_pct is None  # a CPU rank's device is the rank itself


def mapped_block() -> mmap.mmap:
    """Return 64 MiB of resident memory that ``close`` gives back to the kernel. Memory from malloc may lie in a freed
    part of the heap, which was resident before and stays so."""
    block = mmap.mmap(-1, 64 << 20)
    for start in range(0, len(block), mmap.PAGESIZE):
        block[start] = 1
    return block


def test_the_host_peak_counts_from_its_reset() -> None:
    block = mapped_block()
    with_block = measure.peak_host_bytes()
    block.close()
    assert with_block is not None
    if not measure.reset_peak_host_bytes():
        pytest.skip("this kernel does not reset peaks (clear_refs)")
    after = measure.peak_host_bytes()
    assert after is not None and after < with_block
    block = mapped_block()
    again = measure.peak_host_bytes()
    block.close()
    assert again is not None and (again - after) / (64 << 20) == pytest.approx(1.0, abs=0.01)


def test_what_follows_the_window_is_counted_apart(meter) -> None:
    trained = SingleStrategy(make_settings(precision="fp16", seq_length=SEQ_LENGTH))
    trained.build(partial(tiny_model, num_layers=1, hidden_size=16))
    steps, held_out = batches(5), batches(7)[6]
    window = measure.measure(
        trained, meter=meter, warmup=steps[:2], window=steps[2:], validation=held_out, profile=[],
        tick=lambda phase, step: None,
    )  # fmt: skip
    assert (window.applied_steps, window.skipped_steps) == (4, 0)  # the last warm-up step's among them
    assert window.validation_loss == trained.evaluate(held_out)
    assert window.validation_loss != trained.evaluate(steps[-1])
    trained.close()


def test_batches_that_wait_are_told_from_the_one_in_use() -> None:
    one_step = 2 * SEQ_LENGTH * 8  # labels are the inputs themselves
    assert measure.waiting_batch_bytes(batches(5), validation=[]) == 4 * one_step
    assert measure.waiting_batch_bytes(batches(1), validation=batches(2)[1]) == one_step
    large = [{"input_ids": torch.zeros(3 * one_step // 8, dtype=torch.int64)}]
    assert measure.waiting_batch_bytes([*batches(2), large], validation=[]) == 2 * one_step


def test_memory_is_without_the_batches_that_wait() -> None:
    class Weighed(CpuMeter):
        def memory(self) -> DeviceMemory:
            return DeviceMemory(peak_bytes=100, allocated_bytes=60)

    found = measure.step_memory(Weighed(), elsewhere_bytes=30)
    assert (found.peak_bytes, found.allocated_bytes) == (70, 30)


def test_communication_is_that_of_a_measured_step(strategy, meter) -> None:
    moved = {"all_gather": 0, "barrier": 0}
    step = strategy.step

    def counted(micro_batches):
        moved["all_gather"] += 12
        return step(micro_batches)

    strategy.step, strategy.communication_bytes = counted, lambda: moved
    strategy.reset_counters = lambda: moved.update(all_gather=0)
    steps = batches(6)
    window = measure.measure(
        strategy, meter=meter, warmup=steps[:3], window=steps[3:], validation=[], profile=[],
        tick=lambda phase, step: None,
    )  # fmt: skip
    assert window.communication_bytes == {"all_gather": 12}


class OrderMeter(CpuMeter):
    """Notes what it is asked, and steps that ran in between."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        for name in ("settle", "start", "mark", "stop", "memory", "profile"):
            setattr(self, name, self._noting(calls, name))

    def _noting(self, calls: list[str], name: str):
        inner = getattr(Meter if name == "settle" else CpuMeter, name)

        def noted(*arguments):
            calls.append(name)
            return inner(self, *arguments)

        return noted


def test_the_window_begins_on_a_busy_device_and_nothing_waits_in_it(strategy) -> None:
    calls: list[str] = []
    step = strategy.step
    strategy.step = lambda micro_batches: (calls.append("step"), step(micro_batches))[1]
    strategy.settle = lambda: calls.append("strategy settles")
    strategy.transfers = lambda: calls.append("transfers")
    steps = batches(6)
    measure.measure(
        strategy, meter=OrderMeter(calls), warmup=steps[:2], window=steps[2:4], validation=[], profile=steps[4:],
        tick=lambda phase, step: None, built=lambda: calls.append("built"),
    )  # fmt: skip
    assert calls == [
        "step", "built", "strategy settles", "settle", "step", "start", "step", "mark", "step", "mark", "stop",
        "memory", "transfers", "profile",
    ]  # fmt: skip


@pytest.mark.parametrize(("warmup_num", "window_num"), [(0, 1), (1, 2), (2, 1), (3, 4)])
def test_bytes_of_files_are_those_of_as_many_updates_as_are_timed(tmp_path, warmup_num, window_num) -> None:
    """The last update is still under way when the window ends, as the one before was when it began."""
    settings = make_settings(
        rendezvous=f"wear-{os.getpid()}", seq_length=SEQ_LENGTH, offload="nvme", nvme_paths=(str(tmp_path),),
        options={"offload_optimizer": {"chunk_numel": 4096, "io_block_bytes": 4096, "io_depth": 1}},
    )  # fmt: skip
    trained = strategies.get("zero2")(settings)
    trained.build(partial(tiny_model, num_layers=2))
    numel = sum(flat["shard_numel"] for unit in trained._engine.units() for flat in unit["flats"])
    calls: list[str] = []
    traffic, step = trained._engine.offload_traffic, trained.step
    trained._engine.offload_traffic = lambda: (calls.append("wait"), traffic())[1]
    trained.step = lambda batches: (calls.append("step"), step(batches))[1]
    steps = batches(warmup_num + window_num)
    try:
        window = measure.measure(
            trained, meter=CpuMeter(), warmup=steps[:warmup_num], window=steps[warmup_num:], validation=[],
            profile=[], tick=lambda phase, step: None,
        )  # fmt: skip
    finally:
        trained.close()
    before = max(warmup_num - 1, 0)
    assert calls == [*["step"] * before, "wait", *["step"] * (warmup_num + window_num - before), "wait"]
    moved = window.transfers
    assert moved is not None
    # 12 bytes an element; each of the three shards ends with a block. Nothing was read ahead for the very first step.
    assert 12 * numel <= moved.nvme_written_bytes < 12 * numel + 3 * 4096
    within = 0.01 if warmup_num > 1 else 0.15
    assert moved.nvme_read_bytes == pytest.approx(moved.nvme_written_bytes, rel=within)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_categories_and_activations_explain_the_peak(precision) -> None:
    def measured(name: str, *, world_size: int = 1) -> Window:
        settings = make_settings(
            world_size=world_size, local_world_size=1, rendezvous=f"explain-{os.getpid()}", precision=precision,
            seq_length=SEQ_LENGTH,
        )  # fmt: skip
        meter = CpuMeter()
        trained = strategies.get(name)(settings)
        trained.build(partial(tiny_model, num_layers=2))
        steps = batches(4)
        try:
            return measure.measure(
                trained, meter=meter, warmup=steps[:2], window=steps[2:3], validation=[], profile=steps[3:],
                tick=lambda phase, step: None,
            )  # fmt: skip
        finally:
            trained.close()

    floor = measured("compute_only")
    assert floor.activation_bytes is not None and floor.activation_bytes > 0
    # The window's own peak has gradients in it, at most all of them.
    held = floor.memory_bytes["device"]
    beyond = floor.memory.peak_bytes - held["parameters"] - floor.activation_bytes
    assert 0 <= beyond <= held["gradients"]
    row = measured("zero2")
    assert row.activation_bytes is None
    explained = sum(row.memory_bytes["device"].values()) + floor.activation_bytes
    assert explained == pytest.approx(row.memory.peak_bytes, rel=1e-3)
    of_many = measured("compute_only", world_size=64)
    assert of_many.activation_bytes == floor.activation_bytes
    shard_bytes = of_many.activation_and_shard_bytes - of_many.activation_bytes
    assert 0 <= shard_bytes < held["gradients"] / 32
    # One rank's shard is all of a gradient.
    assert floor.activation_and_shard_bytes == pytest.approx(
        floor.memory.peak_bytes - held["parameters"], rel=1e-3
    )


def spin(begin: float, end: float) -> Activity:
    return Activity(name="at::cuda::(anonymous namespace)::spin_kernel(long)", begin=begin, end=end)


def test_profiled_steps_are_split_from_their_head_start_on() -> None:
    """Steps of 10 ms: forward 4 ms, backward 6; times of activities are in microseconds. The first does not count."""
    activities = []
    for begin in (100_000, 200_000, 300_000, 400_000):
        activities += [
            spin(begin - 200, begin),
            Activity(name="gemm", begin=begin, end=begin + 7_000),
            Activity(name="ncclDevKernel", begin=begin + 6_000, end=begin + 9_000),
        ]
    for begin in (100_000, 400_000):  # in the first step and the last
        activities.append(Activity(name="gemm", begin=begin + 7_000, end=begin + 10_000))
    profile = read_profile(activities, [{"forward": 4.0, "backward": 6.0}] * 4)
    phases = {"forward": 4.0, "backward": 3.0, "exposed_communication": 2.0, "host_bound": 1.0}
    assert profile.phases_ms == phases
    assert profile.busy_pct == 90.0


def test_a_profile_without_kernels_leaves_the_phases_as_timed() -> None:
    assert read_profile([], [{"forward": 9.0}, {"forward": 4.0}, {"forward": 5.0}]) == (
        {"forward": 4.5},
        None,
    )
    assert read_profile([], []) == ({}, None)


def empty_row() -> Row:
    settings = Settings(
        model="tiny", world_size=2, precision="fp32", batch_size=4, seq_length=64, grad_accum=3
    )
    return Row(name="r", strategy="ddp", status="ok", settings=settings)


def test_a_step_lasts_from_the_last_ranks_end_to_the_last_ranks_end() -> None:
    row = empty_row()
    assess.apply_windows(
        row,
        [make_window([10.0, 30.0, 20.0], [1.0, 2.0, 3.0]), make_window([20.0, 10.0, 20.0], [3.0, 4.0, 5.0])],
    )
    assert row.step_time_ms is not None
    # Ends: 10, 40, 60 and 20, 30, 50.
    assert row.step_time_ms.samples == [20.0, 20.0, 20.0]
    assert row.loss == [2.0, 3.0, 4.0]
    # world_size x batch_size x grad_accum sequences in 20 ms.
    assert row.samples_per_s == pytest.approx(2 * 4 * 3 / 0.020)
    assert row.tokens_per_s == pytest.approx(64 * 2 * 4 * 3 / 0.020)


def test_ranks_that_take_turns_at_being_late_are_as_fast_as_ranks_that_do_not() -> None:
    turns = [[29.0, 21.0] * 4, [21.0, 29.0] * 4]
    assert sum(assess.step_times_of_all(turns)) == 8 * 25.0  # and not 8 x 29
    assert assess.step_times_of_all([[25.0] * 8, [25.0] * 8]) == [25.0] * 8
    assert assess.step_times_of_all([[10.0] * 3, [12.0] * 3]) == [12.0] * 3


def test_a_copy_beside_a_kernel_keeps_the_device_busy_once() -> None:
    activities = [
        spin(0, 100),
        Activity(name="gemm", begin=50, end=1_100),
        Activity(name="Memcpy HtoD", begin=600, end=2_100),
        Activity(name="gemm", begin=3_600, end=9_000),  # from 3.5 ms on, and longer than the step
    ]
    profile = read_profile(activities, [{"forward": 1.0, "backward": 3.0}], offloads=True)
    assert profile.busy_pct == 62.5


def test_a_device_is_as_busy_as_ranks_are_on_average() -> None:
    row = empty_row()
    assess.apply_windows(row, [make_window(device_busy_pct=80.0), make_window(device_busy_pct=90.0)])
    assert row.device_busy_pct == 85.0


def test_memory_is_the_largest_rank_and_phases_are_the_mean() -> None:
    row = empty_row()
    assess.apply_windows(
        row,
        [
            make_window(
                peak_bytes=100, memory_bytes={"device": {"parameters": 7, "slots": 1}},
                phases_ms={"forward": 1.0, "backward": 2.0, "optimizer": 0.5},
            ),
            make_window(
                peak_bytes=300, memory_bytes={"device": {"parameters": 9}},
                phases_ms={"forward": 3.0, "backward": 2.0, "optimizer": 0.5, "exposed_communication": 1.0},
            ),
        ],
    )  # fmt: skip
    assert row.peak_device_bytes == 300
    assert row.memory_bytes == {"device": {"parameters": 9, "slots": 1}}
    assert row.phases_ms == {"forward": 2.0, "backward": 2.0, "optimizer": 0.5, "exposed_communication": 0.5}


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_bytes_are_those_of_the_fullest_rank(order) -> None:
    of_torch = ("torch_allocated_peak_bytes", "torch_reserved_peak_bytes", "outside_torch_bytes")
    of_window = ("peak_host_bytes", "activation_bytes", "activation_and_shard_bytes")
    row = empty_row()
    assess.apply_windows(
        row,
        [
            make_window(
                memory=DeviceMemory(peak_bytes=size, allocated_bytes=size, **dict.fromkeys(of_torch, size)),
                **dict.fromkeys(of_window, size),
            )
            for size in order
        ],
    )  # fmt: skip
    for name in ("peak_device_bytes", "allocated_device_bytes", *of_torch, *of_window):
        assert getattr(row, name) == 2, name


def test_rates_come_from_the_median_and_losses_are_means() -> None:
    row = empty_row()
    figures = {"energy_per_step_j": 3.0}
    assess.apply_windows(
        row,
        [
            make_window([10.0, 10.0, 70.0], [1.0] * 3, validation_loss=2.0, **figures),
            make_window([10.0, 10.0, 70.0], [2.0] * 3, validation_loss=5.0, **figures),
        ],
    )
    assert row.tokens_per_s == pytest.approx(64 * 2 * 4 * 3 / 0.010)
    assert (row.loss, row.validation_loss) == ([1.5] * 3, 3.5)
    assert row.energy_per_step_j == 6.0 and row.tokens_per_j == pytest.approx(64 * 2 * 4 * 3 / 6)


def test_skipped_steps_of_repeats_add_up() -> None:
    row = empty_row()
    for skipped in (3, 0, 4):
        assess.apply_windows(row, [make_window(applied_steps=1, skipped_steps=skipped)] * 2)
    assert row.skipped_steps == 7


def test_each_rank_has_a_median_of_its_own() -> None:
    row = empty_row()
    assess.apply_windows(
        row, [make_window([1.0, 2.0, 9.0], [1.0] * 3), make_window([4.0, 3.0, 3.0], [1.0] * 3)]
    )
    assert row.rank_step_times_ms == [2.0, 3.0]


def test_a_row_says_where_its_ranks_ran_and_how_they_spoke() -> None:
    row = empty_row()
    told = [{"binding": "node 0: 0-3", "update_cpus": "0-3"}, {"binding": None, "update_cpus": "4-7"}]
    assess.apply_windows(row, [make_window(threads=3, communicator="shm", **of_rank) for of_rank in told])
    assert (row.settings.threads_per_rank, row.settings.communicator) == (3, "shm")
    assert (row.binding, row.update_cpus) == (["node 0: 0-3"], ["0-3", "4-7"])
    row = empty_row()
    assess.apply_windows(row, [make_window()] * 2)
    assert row.binding is None and row.update_cpus is None


def test_communication_is_that_of_the_rank_that_moves_most() -> None:
    row = empty_row()
    moved = [{"all_gather": 6, "reduce_scatter": 4}, {"all_gather": 5, "reduce_scatter": 6}]
    assess.apply_windows(row, [make_window(communication_bytes=bytes_) for bytes_ in moved])
    assert (row.communication_bytes, row.communication_by_collective) == (11, moved[1])
    row = empty_row()
    assess.apply_windows(row, [make_window(communication_bytes={})])
    assert (row.communication_bytes, row.communication_by_collective) == (0, {})


def test_a_repeat_adds_samples_and_never_lowers_a_peak() -> None:
    row = empty_row()
    moved = WindowTransfers(to_host_bytes=4_000_000)
    assess.apply_windows(row, [make_window([10.0, 10.0], [1.0, 1.0], peak_bytes=100, transfers=moved)])
    assess.apply_windows(row, [make_window([30.0, 30.0], [9.0, 9.0], peak_bytes=90, transfers=moved)])
    assert row.step_time_ms is not None
    assert row.step_time_ms.samples == [10.0, 10.0, 30.0, 30.0]
    assert row.step_time_ms.median == 20.0
    assert row.peak_device_bytes == 100
    assert row.loss == [1.0, 1.0]
    assert row.transfers is not None
    assert row.transfers.achieved_gb_s == {"to_host": pytest.approx(0.2)}  # by the median of all samples


def test_what_cannot_be_had_is_null() -> None:
    row = empty_row()
    assess.apply_windows(
        row,
        [
            make_window(
                [1.0], [math.nan], validation_loss=None, peak_host_bytes=None, communication_bytes=None
            )
        ],
    )
    assert row.loss is None
    assert row.validation_loss is None
    assert row.peak_host_bytes is None
    assert row.outside_torch_bytes is None and row.torch_allocated_peak_bytes is None
    assert row.communication_bytes is None and row.communication_by_collective is None
