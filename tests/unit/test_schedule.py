"""The order of a comparison's runs: repeats, references, and how long a reference is needed."""

from __future__ import annotations

from comparison_samples import TWO_GPUS, plan

from zerobench.bench.schedule import schedule, task_num


def test_repeats_are_interleaved_over_rows() -> None:
    steps = schedule(plan(strategies=("zero0", "zero1"), repeats=3))
    order = [(step.repeat, step.index, step.configuration.strategy) for step in steps]
    assert order == [
        (0, 0, "zero0"), (0, 1, "zero1"), (1, 0, "zero0"), (1, 1, "zero1"), (2, 0, "zero0"), (2, 1, "zero1"),
    ]  # fmt: skip


def test_one_reference_serves_all_that_train_the_same() -> None:
    steps = schedule(plan(**TWO_GPUS))
    assert [step.needs_reference for step in steps] == [False, False, True, True]
    floor, single, zero1, zero3 = (step.group for step in steps)
    # `single` runs on other global batches than two ranks do, and is its own reference.
    assert floor == zero1 == zero3 != single
    assert task_num(steps) == 4 + 1


def test_single_is_compared_where_others_train_the_same() -> None:
    steps = schedule(plan(strategies=("single", "zero1"), world_size=(1,)))
    assert [step.needs_reference for step in steps] == [True, True] and task_num(steps) == 2 + 1


def test_what_trains_nothing_makes_no_reference_necessary() -> None:
    steps = schedule(plan(strategies=("compute_only", "single"), world_size=(1,)))
    assert not any(step.needs_reference for step in steps) and task_num(steps) == 2


def test_repeats_are_not_verified_again() -> None:
    steps = schedule(plan(strategies=("zero0", "zero1"), repeats=2))
    assert [step.needs_reference for step in steps] == [True, True, False, False]
    assert task_num(steps) == 4 + 1


def test_a_reference_is_kept_until_the_last_row_of_its_group() -> None:
    steps = schedule(plan(strategies=("zero1", "zero3"), precision=("fp32", "bf16"), repeats=2))
    assert [step.ends_group for step in steps] == [False, True, False, True, *[False] * 4]


def test_a_group_knows_what_its_verification_must_leave_room_for() -> None:
    offloaded = {"offload": ("none", "cpu_optimizer"), "grad_accum": (1,)}
    first, *others = (step.group for step in schedule(plan(strategies=("zero2",), **offloaded)))
    assert first.offloads and others == [first]
    assert first.most_ranks == 2
    # Two micro-batches on one rank are the global batch of one on each of two ranks.
    steps = schedule(plan(strategies=("zero1",), world_size=(1, 2), grad_accum=(1, 2)))
    shape = [
        (step.configuration.settings.world_size, step.configuration.settings.grad_accum) for step in steps
    ]
    groups = {at: step.group for at, step in zip(shape, steps, strict=True)}
    assert groups[1, 2] == groups[2, 1] and groups[1, 2].most_ranks == 2
    assert groups[1, 1].most_ranks == 1 and not groups[1, 1].offloads
