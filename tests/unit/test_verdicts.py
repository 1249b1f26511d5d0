"""Verdicts: which row to take, which others serve, and which rows have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from report_samples import sample

from zerobench.report import finish_rows, summarise, table_text
from zerobench.results.schema import Results, Row
from zerobench.results.verdicts import device_bytes, verdicts

GIB = 1 << 30


def results_of(rows: Mapping[str, tuple[float, float] | str], **settings: Any) -> Results:
    """Rows by strategy, each with step time and peak in GiB, or with a status; names may go on after a slash."""
    results = sample()
    plain = results.rows[1]
    results.rows = []
    for name, given in rows.items():
        row = plain.model_copy(deep=True)
        row.name, row.strategy = name, name.partition("/")[0]
        row.stage = int(row.strategy[-1]) if row.strategy.startswith("zero") else None
        row.settings = row.settings.model_copy(
            update={"world_size": 2, "device": "cuda", "device_memory_gib": 80.0, **settings}
        )
        if isinstance(given, str):
            row.status, row.step_time_ms, row.peak_device_bytes = given, None, None  # type: ignore[assignment]
        else:
            step_ms, peak_gib = given
            row.step_time_ms = summarise([step_ms + 0.001 * index for index in range(20)])
            row.peak_device_bytes = int(peak_gib * GIB)
        results.rows.append(row)
    return results


def verdicts_of(results: Results, *, limit_gib: float | None = None) -> dict[str, str | None]:
    finish_rows(results)
    limit = None if limit_gib is None else int(limit_gib * GIB)
    found = verdicts(results.rows, results.machine, memory_limit_bytes=limit)
    return {row.name: verdict for row, verdict in zip(results.rows, found, strict=True)}


def row_named(results: Results, name: str) -> Row:
    return next(row for row in results.rows if row.name == name)


def test_the_fastest_is_optimal_and_rows_within_ten_per_cent_work() -> None:
    results = results_of({"zero0": (100.0, 70.0), "zero1": (109.0, 60.0), "zero2": (112.0, 60.0)})
    assert verdicts_of(results) == {"zero0": "optimal", "zero1": "works", "zero2": None}


def test_of_rows_that_tie_the_one_that_shards_and_offloads_least_is_optimal() -> None:
    results = results_of({"zero3": (100.0, 70.0), "zero1/host": (100.0, 70.0), "zero1": (100.0, 70.0)})
    row_named(results, "zero1/host").settings.offload = "cpu_optimizer"
    assert verdicts_of(results) == {"zero3": "works", "zero1/host": "works", "zero1": "optimal"}


@pytest.mark.parametrize(("peak_gib", "verdict"), [(48.0, "unnecessary"), (49.0, None)])
def test_saving_memory_is_unnecessary_where_the_optimal_row_leaves_forty_per_cent(
    peak_gib: float, verdict: str | None
) -> None:
    results = results_of({"zero0": (100.0, peak_gib), "zero3": (130.0, 20.0)})
    assert verdicts_of(results)["zero3"] == verdict


def test_a_slower_row_that_saves_nothing_has_no_verdict() -> None:
    results = results_of({"zero0": (100.0, 20.0), "zero3": (130.0, 20.0)})
    assert verdicts_of(results)["zero3"] is None


def test_a_row_that_ran_out_of_memory_does_not_fit() -> None:
    results = results_of({"zero0": "oom", "zero3": (100.0, 70.0)})
    assert verdicts_of(results) == {"zero0": "does not fit", "zero3": "optimal"}


def test_under_a_limit_the_fastest_row_that_fits_is_the_fallback() -> None:
    results = results_of({"zero0": (100.0, 70.0), "zero2": (130.0, 50.0), "zero3": (135.0, 30.0)})
    assert verdicts_of(results, limit_gib=60.0) == {
        "zero0": "does not fit",
        "zero2": "fallback",
        "zero3": "works",
    }


def test_a_row_is_the_fallback_for_its_batch_where_what_shards_less_is_out_of_memory() -> None:
    results = results_of(
        {"zero0": (100.0, 70.0), "zero0/32": "oom", "zero3/32": (600.0, 70.0), "fsdp2/32": (700.0, 70.0)}
    )
    for name in ("zero0/32", "zero3/32", "fsdp2/32"):
        row_named(results, name).settings.batch_size = 32
    found = verdicts_of(results)
    assert found["zero3/32"] == "fallback"
    assert found["fsdp2/32"] is None  # zero3 is faster and fits


def test_what_offloads_more_and_is_out_of_memory_leaves_no_fallback() -> None:
    results = results_of({"zero0": (100.0, 70.0), "zero3/32": (600.0, 70.0), "zero3/host": "oom"})
    for name in ("zero3/32", "zero3/host"):
        row_named(results, name).settings.batch_size = 32
    row_named(results, "zero3/host").settings.offload = "cpu_full"
    assert verdicts_of(results)["zero3/32"] is None


@pytest.mark.parametrize("status", ["wrong", "failed", "skipped"])
def test_rows_without_a_right_result_have_no_verdict(status: str) -> None:
    results = results_of({"zero0": (100.0, 70.0), "zero1": status})
    assert verdicts_of(results) == {"zero0": "optimal", "zero1": None}


def test_rows_of_other_dtypes_and_the_floor_have_no_verdict() -> None:
    results = results_of({"zero0": (100.0, 70.0), "ddp": (80.0, 70.0), "compute_only": (50.0, 20.0)})
    row_named(results, "ddp").comparable = False
    assert verdicts_of(results) == {"zero0": "optimal", "ddp": None, "compute_only": None}


def test_no_row_fits_under_a_limit_below_all_peaks() -> None:
    results = results_of({"zero0": (100.0, 70.0), "zero3": (130.0, 50.0)})
    assert set(verdicts_of(results, limit_gib=10.0).values()) == {"does not fit"}


def test_the_memory_of_a_device_is_what_machine_option_and_limit_leave() -> None:
    row = results_of({"zero0": (100.0, 70.0)}, device_memory_gib=None).rows[0]
    gpus = {"gpus": [{"total_bytes": 90 * GIB}, {"total_bytes": 80 * GIB}, {"total_bytes": GIB}]}
    assert device_bytes(row, gpus) == 80 * GIB
    assert device_bytes(row, gpus, 60 * GIB) == 60 * GIB
    assert device_bytes(row, {}) is None
    row.settings.device_memory_gib = 70.0
    assert device_bytes(row, gpus) == 70 * GIB
    row.settings.device, row.settings.device_memory_gib = "cpu", None
    assert device_bytes(row, {"memory_bytes": 8 * GIB}) == 4 * GIB


def test_each_workload_has_an_optimal_row_in_the_table() -> None:
    results = results_of({"zero0": (100.0, 20.0), "zero3": (130.0, 10.0), "zero0/long": (300.0, 20.0)})
    row_named(results, "zero0/long").settings.seq_length = 1024
    finish_rows(results)
    assert [row.verdict for row in results.rows] == ["optimal", "unnecessary", "optimal"]
    text = table_text(results, width=300)
    assert "verdict" in text and "unnecessary" in text
