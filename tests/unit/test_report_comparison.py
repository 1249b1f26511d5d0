"""Columns that compare rows: with the fastest, with a baseline, with the floor."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import grid, sample

from zerobench.report import finish_rows, summarise, table_text
from zerobench.results import stats
from zerobench.results.rows import checksum_marks, ties_with_fastest
from zerobench.results.schema import Results, Row

times = st.floats(min_value=0.1, max_value=1e4)


def sample_rows() -> dict[str, Row]:
    return {row.strategy: row for row in sample().rows}


def finished(rows: list[Row], baseline: str | None = None) -> Results:
    results = sample()
    results.rows = rows
    finish_rows(results, baseline)
    return results


COMPARED = (
    "relative",
    "relative_uncertainty",
    "speedup",
    "memory_change_pct",
    "baseline",
    "tokens_per_s_per_peak_gb",
)


def compared(results: Results) -> dict[str, tuple[object, ...]]:
    return {row.name: tuple(getattr(row, column) for column in COMPARED) for row in results.rows}


def random_rows(
    seconds: list[list[float]], peaks: list[int], statuses: list[str], ranked: list[bool]
) -> list[Row]:
    rows = []
    for (name, row), samples, peak, status, comparable in zip(
        sample_rows().items(), seconds, peaks, statuses, ranked, strict=False
    ):
        row.step_time_ms = summarise(samples)
        row.name, row.peak_device_bytes, row.comparable = name, peak, comparable
        row.status = status  # type: ignore[assignment]
        rows.append(row)
    return rows


@given(
    st.lists(st.lists(times, min_size=1, max_size=9), min_size=7, max_size=7),
    st.lists(st.integers(1, 10**10), min_size=7, max_size=7),
    st.lists(st.sampled_from(["ok", "ok", "ok", "wrong", "oom", "failed"]), min_size=7, max_size=7),
    st.lists(st.sampled_from([True, True, True, False]), min_size=7, max_size=7),
    st.randoms(),
    st.integers(-6, 6),
)
@settings(max_examples=60, deadline=None)
def test_compared_columns_ignore_row_order_and_unit(
    samples: list[list[float]],
    peaks: list[int],
    statuses: list[str],
    ranked: list[bool],
    shuffler: random.Random,
    exponent: int,
) -> None:
    rows = random_rows(samples, peaks, statuses, ranked)
    expected = compared(finished(rows))
    shuffled = random_rows(samples, peaks, statuses, ranked)
    shuffler.shuffle(shuffled)
    assert compared(finished(shuffled)) == expected
    scaled = random_rows([[x * 2.0**exponent for x in window] for window in samples], peaks, statuses, ranked)
    for name, values in compared(finished(scaled)).items():
        assert values[:-1] == expected[name][:-1]
    eligible = [row for row in rows if row.status == "ok" and row.comparable]
    relatives = [row.relative for row in rows if row.relative is not None]
    assert len(relatives) == len(eligible)
    assert all(relative >= 1.0 for relative in relatives)
    assert (1.0 in relatives) == bool(eligible)


def test_relative_and_its_uncertainty() -> None:
    rows = sample_rows()
    rows["ddp"].step_time_ms = summarise([100.0, 102.0, 98.0, 101.0, 99.0, 100.0])
    rows["zero3"].step_time_ms = summarise([200.0, 202.0, 198.0, 201.0, 199.0, 200.0])
    results = finished([rows["ddp"], rows["zero3"]])
    ddp, zero3 = results.rows
    assert (ddp.relative, ddp.relative_uncertainty) == (1.0, None)
    assert zero3.relative == pytest.approx(2.0)
    assert ddp.step_time_ms and zero3.step_time_ms
    top, bottom = stats.median_error(zero3.step_time_ms.samples), stats.median_error(ddp.step_time_ms.samples)
    assert top and bottom
    assert zero3.relative_uncertainty == pytest.approx(2.0 * math.hypot(top / 200, bottom / 100))
    assert (zero3.speedup, ddp.speedup) == (pytest.approx(0.5), 1.0)


def test_relative_is_per_token() -> None:
    rows = sample_rows()
    ddp, zero1 = rows["ddp"], rows["zero1"]
    ddp.step_time_ms, zero1.step_time_ms = summarise([100.0] * 3), summarise([100.0] * 3)
    zero1.settings.batch_size *= 2
    finished([ddp, zero1])
    assert (zero1.relative, ddp.relative) == (1.0, 2.0)


def test_accumulated_micro_batches_are_tokens_of_the_step() -> None:
    rows = sample_rows()
    ddp, zero1 = rows["ddp"], rows["zero1"]
    ddp.step_time_ms, zero1.step_time_ms = summarise([100.0] * 3), summarise([200.0] * 3)
    zero1.settings.grad_accum, ddp.settings.grad_accum = 4, 1
    finished([ddp, zero1])
    assert (zero1.relative, ddp.relative) == (1.0, 2.0)


def test_equally_fast_rows_are_ordered_by_name() -> None:
    rows = sample_rows()
    twins = [rows["zero1"], rows["ddp"]]
    for row in twins:
        row.step_time_ms = summarise([100.0, 101.0, 102.0] * 2)
    for order in (twins, twins[::-1]):
        finished(order)
        assert {row.strategy: row.relative_uncertainty is None for row in order} == {
            "ddp": True,
            "zero1": False,
        }


@pytest.mark.parametrize(("ratio", "ties"), [(2.0, True), (2.2, True), (2.3, False), (2.9, False)])
def test_a_tie_is_a_ratio_whose_logarithm_is_below_two_of_its_errors(ratio, ties) -> None:  # type: ignore[no-untyped-def]
    row = sample_rows()["zero3"]
    row.relative, row.relative_uncertainty = ratio, 0.4 * ratio
    assert ties_with_fastest(row) is ties  # e to the 0.8 is 2.23


def test_wrong_rows_are_never_ranked() -> None:
    rows = sample_rows()
    rows["zero1"].status = "wrong"
    rows["zero1"].step_time_ms = summarise([1.0, 1.0, 1.0])  # the fastest by far
    rows["zero2"].comparable = False
    rows["zero2"].step_time_ms = summarise([2.0, 2.0, 2.0])
    results = finished(list(rows.values()))
    by_strategy = {row.strategy: row for row in results.rows}
    assert compared(results)[by_strategy["zero1"].name] == (None,) * len(COMPARED)
    assert by_strategy["zero2"].relative is None and by_strategy["zero2"].speedup is None
    assert by_strategy["zero2"].tokens_per_s_per_peak_gb is not None
    assert [row.strategy for row in results.rows if row.relative == 1.0] == ["zero0"]


def test_gb_is_ten_to_the_ninth() -> None:
    row = sample_rows()["ddp"]
    row.step_time_ms, row.peak_device_bytes = summarise([1000.0]), 2_000_000_000
    finished([row])
    assert row.tokens_per_s_per_peak_gb == pytest.approx(2 * 8 * 128 / 2)


def test_default_baseline_is_ddp_then_single() -> None:
    rows = sample_rows()
    results = finished(list(rows.values()))
    assert {row.baseline for row in results.rows} == {rows["ddp"].name}  # single too, across world sizes
    assert rows["ddp"].memory_change_pct == 0.0
    rows["ddp"].status = "oom"
    results = finished(list(rows.values()))
    assert {row.baseline for row in results.rows if row.status == "ok"} == {rows["single"].name}


def test_no_row_is_held_against_one_that_is_not_ranked() -> None:
    rows = sample_rows()
    rows["ddp"].comparable = False
    assert {row.baseline for row in finished(list(rows.values()), "ddp").rows} == {None}
    assert {row.baseline for row in finished(list(rows.values()), rows["ddp"].name).rows} == {None}


@pytest.mark.parametrize(
    "change", [{"clip": 0.5}, {"checkpointing": True}, {"batch_size": 3}, {"world_size": 4, "batch_size": 4}]
)
def test_a_baseline_of_other_settings_is_none(change) -> None:  # type: ignore[no-untyped-def]
    rows = sample_rows()
    rows["ddp"].settings = rows["ddp"].settings.model_copy(update=change)
    finished([rows["ddp"], rows["zero3"]], "ddp")
    assert rows["ddp"].speedup == 1.0 and rows["zero3"].baseline is None


def test_peaks_are_held_against_a_baseline_that_saw_all_state() -> None:
    rows = sample_rows()
    rows["ddp"].settings.warmup_steps, rows["ddp"].settings.num_steps = 0, 1
    finished([rows["ddp"], rows["zero3"]])
    assert rows["zero3"].speedup is not None and rows["zero3"].memory_change_pct is None


def test_the_baseline_at_the_nearest_settings_is_taken() -> None:
    def against(row_changes: dict[str, object], *base_changes: dict[str, object]) -> str | None:
        made = []
        for index, changes in enumerate((row_changes, *base_changes)):
            one = sample_rows()["zero3" if not index else "ddp"]
            one.settings = one.settings.model_copy(update=changes)
            one.name = f"ddp {changes}" if index else "row"
            made.append(one)
        return finished(made, "ddp").rows[0].baseline

    # Names that come first in the alphabet are the last resort.
    on_device, on_nvme = {"offload": "none"}, {"offload": "a disk"}
    assert against({"offload": "cpu_optimizer"}, on_nvme, on_device) == f"ddp {on_device}"
    accumulated, at_once = {"batch_size": 4, "grad_accum": 2}, {"batch_size": 8, "grad_accum": 1}
    assert against(at_once, accumulated, at_once) == f"ddp {at_once}"
    assert against(at_once, accumulated) == f"ddp {accumulated}"  # as many tokens


def test_scaling_is_against_the_same_row_on_the_fewest_ranks() -> None:
    row = sample_rows()["zero1"]
    wider, widest, other = (row.model_copy(deep=True) for _ in range(3))
    for found, ranks, strategy in ((wider, 4, "zero1"), (widest, 8, "zero1"), (other, 8, "zero2")):
        found.name, found.settings.world_size, found.strategy = f"{strategy}_{ranks}", ranks, strategy
    assert widest.step_time_ms is not None
    widest.step_time_ms = summarise([2 * time_ms for time_ms in widest.step_time_ms.samples])
    finished([row, wider, widest, other])
    assert [found.scaling_efficiency for found in (row, wider, widest, other)] == [None, 1.0, 0.5, None]


def test_one_rank_is_not_held_against_several_numbers_of_ranks() -> None:
    rows = sample_rows()
    single, two, four = rows["single"], rows["ddp"], sample_rows()["ddp"]
    four.name, four.settings.world_size = "four", 4
    assert finished([single, two], "ddp").rows[0].baseline == two.name
    assert finished([single, two, four], "ddp").rows[0].baseline is None


def test_ddp_counts_before_ddp_with_masters_where_both_are_ranked() -> None:
    rows = sample_rows()
    rows["zero0"].strategy = "ddp_master"
    assert {row.baseline for row in finished(list(rows.values())).rows} == {rows["ddp"].name}


def test_a_checksum_alone_is_equal_to_none() -> None:
    rows = list(sample_rows().values())
    assert checksum_marks(rows[1:2]) == [""]
    assert set(checksum_marks(rows)) == {"", "="}


def test_the_default_baseline_in_low_precision_is_ddp_with_the_dtypes_of_the_others() -> None:
    rows = sample_rows()
    rows["ddp"].comparable = False
    rows["zero0"].strategy = "ddp_master"
    results = finished(list(rows.values()))
    assert {row.baseline for row in results.rows if row.comparable} == {rows["zero0"].name}


def test_memory_is_explained_by_categories_and_the_activations_of_the_floor() -> None:
    rows = sample_rows()
    floor = rows["zero0"]
    floor.strategy, floor.activation_bytes = "compute_only", 400
    explained = rows["zero3"]
    explained.memory_bytes = {"device": {"parameters": 300, "staging": 290}, "host": {"staging": 10_000}}
    explained.peak_device_bytes = 1000
    finished(list(rows.values()))
    assert explained.memory_explained_pct == pytest.approx(99.0)
    assert floor.memory_explained_pct is None
    floor.settings.batch_size += 1  # other activations
    finished(list(rows.values()))
    assert explained.memory_explained_pct is None


def test_gradient_shards_that_come_as_activations_go_are_not_counted_beside_them() -> None:
    rows = sample_rows()
    floor, explained = rows["zero0"], rows["zero3"]
    floor.strategy, floor.activation_bytes = "compute_only", 400
    floor.memory_bytes, floor.peak_device_bytes = {"device": {"parameters": 600, "gradients": 600}}, 1050
    explained.memory_bytes = {"device": {"parameters": 300, "gradients": 150}}
    explained.peak_device_bytes = 750
    finished(list(rows.values()))
    assert explained.memory_explained_pct == pytest.approx(100.0)  # 450 are the floor's beside its parameters
    explained.memory_bytes["device"]["gradients"] = 20
    explained.peak_device_bytes = 720
    finished(list(rows.values()))
    assert explained.memory_explained_pct == pytest.approx(100.0)  # all of them fit beside activations' peak
    explained.settings.world_size = floor.settings.world_size = 1  # a CPU rank's are there for good
    explained.peak_device_bytes = 300 + 20 + 400
    explained.memory_bytes["device"]["gradients"] = 20
    finished(list(rows.values()))
    assert explained.memory_explained_pct == pytest.approx(100.0)
    explained.strategy, explained.settings.device, floor.settings.device = "zero0", "cuda", "cuda"
    explained.memory_bytes["device"]["gradients"], explained.peak_device_bytes = 150, 750
    finished(list(rows.values()))
    assert explained.memory_explained_pct == pytest.approx(100.0)  # on a GPU every stage's come in backward
    explained.settings.grad_accum = floor.settings.grad_accum = 2  # there for good
    explained.memory_bytes["device"]["gradients"] = 150
    explained.peak_device_bytes = 850
    finished(list(rows.values()))
    assert explained.memory_explained_pct == pytest.approx(100.0)


def test_shards_of_gradients_are_counted_as_the_floor_saw_them_beside_activations() -> None:
    """With checkpointing the peak of activations lies before any gradient exists."""
    rows = sample_rows()
    floor, explained = rows["zero0"], rows["zero3"]
    floor.strategy, floor.activation_bytes, floor.activation_and_shard_bytes = "compute_only", 400, 410
    floor.memory_bytes, floor.peak_device_bytes = {"device": {"parameters": 600, "gradients": 600}}, 600 + 700
    floor.settings.checkpointing = explained.settings.checkpointing = True

    def peak_with(gradient_bytes: int) -> float:
        """Beside 300 of parameters."""
        explained.memory_bytes = {"device": {"parameters": 300, "gradients": gradient_bytes}}
        explained.peak_device_bytes = 1000
        finished(list(rows.values()))
        assert explained.memory_explained_pct is not None
        return 10 * explained.memory_explained_pct - 300

    assert peak_with(300) == pytest.approx(410)  # of two ranks' gradients, as the floor took it
    assert peak_with(0) == 400
    assert peak_with(150) == pytest.approx(405)
    assert peak_with(5) < 405  # never more than both in full
    assert peak_with(450) == pytest.approx((410 + 700) / 2)  # reduced in a wider dtype
    assert peak_with(600) == 700
    explained.settings.optimizer_in_backward = True
    assert peak_with(5) == 405
    assert peak_with(100) == pytest.approx(410)
    assert explained.dtypes is not None
    explained.dtypes.reduce = "float64"
    assert peak_with(100) == 500
    explained.settings.optimizer_in_backward, floor.activation_and_shard_bytes = False, None
    assert peak_with(100) == 500  # of an earlier file
    assert peak_with(450) == 700


def test_named_baseline() -> None:
    rows = sample_rows()
    results = finished(list(rows.values()), "zero0")
    assert {row.baseline for row in results.rows} == {rows["zero0"].name}
    results = finished(list(rows.values()), rows["zero3"].name)
    assert rows["zero3"].speedup == 1.0
    results = finished(list(rows.values()), "no_such_row")
    assert {row.baseline for row in results.rows} == {None}


def test_baseline_is_the_row_with_the_same_settings() -> None:
    rows = []
    for batch_size in (8, 16):
        for strategy, row in sample_rows().items():
            if strategy in ("ddp", "zero3"):
                row.settings.batch_size, row.name = batch_size, f"{strategy}_bs{batch_size}"
                rows.append(row)
    results = finished(rows)
    assert {row.name: row.baseline for row in results.rows} == {
        "ddp_bs8": "ddp_bs8",
        "zero3_bs8": "ddp_bs8",
        "ddp_bs16": "ddp_bs16",
        "zero3_bs16": "ddp_bs16",
    }


@pytest.mark.parametrize(
    "change", [{"precision": "fp32"}, {"seq_length": 64}, {"data": "synthetic"}, {"model": "small"}]
)
def test_another_workload_is_another_race(change) -> None:  # type: ignore[no-untyped-def]
    rows = [sample_rows()["ddp"] for _ in range(2)]
    rows[0].settings = rows[0].settings.model_copy(update=change)
    for row, milliseconds in zip(rows, (200.0, 100.0), strict=True):
        row.name, row.step_time_ms = str(milliseconds), summarise([milliseconds] * 3)
    assert [row.relative for row in finished(rows).rows] == [1.0, 1.0]


def test_baselines_that_differ_between_workloads_are_named_below_the_table() -> None:
    """In bf16 ddp has other dtypes, so single is the baseline there."""
    results = grid()
    assert "vs ddp" in table_text(results, width=200) and "Baselines" not in table_text(results, width=200)
    for row in results.rows:
        row.comparable = (row.settings.precision, row.strategy) != ("bf16", "ddp")
    finish_rows(results)
    text = table_text(results, width=200)
    assert "vs baseline" in text and "Baselines: ddp (fp32) and single (bf16)." in text
    assert "Baselines" not in table_text(results, width=80)  # which has no room for the columns
