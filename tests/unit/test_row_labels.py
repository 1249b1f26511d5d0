"""Labels of rows: what the grid varies, and nothing that follows from it."""

from __future__ import annotations

from advice_samples import row

from zerobench.results.rows import row_labels


def test_world_sizes_bring_no_accumulation_communicator_or_threads_into_labels() -> None:
    rows = [
        row(
            "zero1",
            100.0,
            800,
            world_size=ranks,
            grad_accum=4 // ranks,
            communicator=how,
            threads_per_rank=4 // ranks,
        )
        for ranks, how in ((1, "none"), (2, "shm"), (4, "c10d"))
    ]
    assert row_labels(rows) == ["zero1, ranks 1", "zero1, ranks 2", "zero1, ranks 4"]


def test_settings_that_may_follow_are_given_where_nothing_else_tells_rows_apart() -> None:
    rows = [
        row(strategy, 100.0, 800, communicator=how)
        for strategy, how in (("zero1", "shm"), ("zero1", "c10d"), ("zero2", "shm"))
    ]
    assert row_labels(rows) == ["zero1, communicator shm", "zero1, communicator c10d", "zero2"]


def test_accumulation_that_was_asked_for_is_given() -> None:
    rows = [
        row("zero1", 100.0, 800, batch_size=size, grad_accum=accum) for size in (4, 8) for accum in (1, 2)
    ]
    assert row_labels(rows) == [
        "zero1, batch 4, accum 1",
        "zero1, batch 4, accum 2",
        "zero1, batch 8, accum 1",
        "zero1, batch 8, accum 2",
    ]
