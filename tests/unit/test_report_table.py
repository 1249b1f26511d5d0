"""The table, and the figures in it that hang together over rows."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from report_samples import GOLDEN, GOLDEN_TABLES, gpus, grid, mixed, sample

from zerobench.report import (
    advise,
    finish_rows,
    render_table,
    summarise,
    table_text,
    write_csv,
)
from zerobench.report.columns import table_columns
from zerobench.report.notes import note_lines
from zerobench.results.schema import Deviation, Results, RowDtypes


@pytest.mark.parametrize("name", GOLDEN_TABLES)
def test_golden_tables(name: str) -> None:
    make, width = GOLDEN_TABLES[name]
    text = table_text(make(), width=width)
    assert text == (GOLDEN / name).read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= width


def test_the_settings_name_dtypes_also_beside_a_floor_that_has_no_masters() -> None:
    results = gpus()
    low = {"param": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}
    for row in results.rows:
        state = "bfloat16" if row.strategy == "compute_only" else "float32"
        row.dtypes = RowDtypes(**low, master=state, state=state)
    assert any(row.strategy == "compute_only" for row in results.rows)
    assert "dtypes bf16/bf16/bf16/fp32/fp32 (param/compute/reduce/master/state)" in table_text(
        results, width=400
    )


def test_dtypes_tell_what_micro_batches_are_summed_in() -> None:
    results = gpus()
    low = {"param": "bfloat16", "compute": "bfloat16", "reduce": "bfloat16"}
    for row in results.rows:
        row.dtypes = RowDtypes(**low, accumulate="float32", master="float32", state="float32")
    assert "dtypes bf16/bf16/bf16+fp32/fp32/fp32 (param/" in table_text(results, width=400)


@pytest.mark.parametrize(
    ("repeats", "text"),
    [([3, 3, 3], "repeats 3 ·"), ([1, 1, 1], "repeats 1 of 3 ·"), ([2, 1, 1], "repeats 1 to 2 of 3 ·")],
)
def test_the_settings_say_how_many_repeats_rows_have(repeats: list[int], text: str) -> None:
    results = sample()
    results.rows = results.rows[:3]
    for row, number in zip(results.rows, repeats, strict=True):
        assert row.step_time_ms is not None
        row.settings.repeats = 3
        row.step_time_ms = summarise(row.step_time_ms.samples * number)
    assert text in table_text(results, width=400)
    results.rows[2].status, results.rows[2].step_time_ms = "failed", None  # which is not repeated
    assert text in table_text(results, width=400)


@pytest.mark.parametrize("width", range(60, 200, 7))
@pytest.mark.parametrize("make", [sample, mixed])
def test_no_width_breaks_a_number(make, width: int) -> None:  # type: ignore[no-untyped-def]
    results = make()
    text = table_text(results, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    row = results.rows[0]
    assert f"{row.step_time_ms.median:.1f} ± {row.step_time_ms.mad:.1f}" in text
    assert f"{row.peak_device_bytes / 2**20:.1f}" in text


def test_a_narrow_terminal_is_told_that_the_peak_is_left_out() -> None:
    seen = set()
    for width in range(24, 60):
        text = table_text(sample(), width=width)
        has_peak = "peak" in text.partition("───")[0].splitlines()[-2]
        left_out = " ".join(text.split()).partition("Omitted to fit the width: ")[2]
        assert ("peak MiB" in left_out) == (not has_peak)
        seen.add(has_peak)
    assert seen == {True, False}


def test_a_deviation_that_is_no_number_is_shown_as_its_file_has_it() -> None:
    results = sample()
    deviation = results.rows[-1].deviation
    assert deviation is not None
    deviation.update = float("nan")
    file = Results.model_validate_json(results.model_dump_json())
    assert table_text(results, width=400) == table_text(file, width=400)


@pytest.mark.parametrize("make", [sample, mixed, gpus])
def test_notes_explain_columns_that_are_there(make) -> None:  # type: ignore[no-untyped-def]
    seen = set()
    for width in range(60, 200, 5):
        text = table_text(make(), width=width)
        titles = text.partition("───")[0].splitlines()[-2]
        text = " ".join(text.split())
        assert ("marked so" in text) == ("update" in titles)
        assert ("bit for bit" in text) or make is mixed
        assert "MFU" in titles or "MFU is relative to" not in text
        seen.add("update" in titles)
    assert seen == {True, False}


def test_wrong_rows_show_no_number_but_their_deviation() -> None:
    results = mixed()
    line = next(line for line in table_text(results, width=180).splitlines() if line.startswith("zero1"))
    assert line.split()[:2] == ["zero1", "wrong"]
    assert [word for word in line.split()[2:] if word[0].isdigit()] == ["3.8e-01"]


def test_columns_are_in_the_units_of_what_they_show() -> None:
    results = sample()
    for row, peak_bytes in zip(results.rows, (9 << 30, 3 << 30, *[1 << 30] * 5), strict=True):
        row.peak_device_bytes, row.allocated_device_bytes = peak_bytes, 1 << 20
    for row, update in zip(results.rows[1:], (0.0, 4e-8, 1e-30, 0.2, None, 0.0), strict=True):
        assert row.deviation is not None
        row.deviation.update, row.checksum = update, None
    columns = {(one.title, one.unit): one.cells for one in table_columns(results.rows)}
    assert columns["peak", "GiB"][:3] == ["9.0", "3.0", "1.0"]
    update = next(cells for (title, _), cells in columns.items() if title == "update")
    assert update[1:] == ["0", "4.0e-08", "1.0e-30", "2.0e-01", "-", "0"]


def test_a_column_names_its_baseline_where_all_rows_have_one_of_it() -> None:
    results = sample()
    assert "vs ddp" in {one.unit for one in table_columns(results.rows)}
    zero3 = next(row for row in results.rows if row.strategy == "zero3")
    zero3.baseline = zero3.name
    units = {one.unit for one in table_columns(results.rows)}
    assert "vs baseline" in units and "vs ddp" not in units


def test_unequal_checksums_are_marked() -> None:
    results = sample()
    assert "≠" not in table_text(results) and "= parameters equal bit for bit" in table_text(results)
    results.rows[3].checksum = "another"
    assert table_text(results).count("3.1e-03 ≠") == 4


def test_rows_that_settings_do_not_tell_apart_go_by_name() -> None:
    results = sample()
    twin = results.rows[1].model_copy(deep=True)
    twin.name = "zs0_second_config"
    results.rows.append(twin)
    assert "zs0_second_config" in table_text(results)


def test_terminal_that_knows_ascii_only() -> None:
    from rich.console import Console

    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=100)
    console.print(render_table(mixed()))
    assert b"118.0 +- 1.2" in raw.getvalue()


def test_no_rows() -> None:
    results = sample()
    results.rows = []
    assert "no rows yet" in table_text(results)
    assert advise(results) == ["Nothing to recommend: no row is both correct and comparable."]


def test_wrong_row_without_a_deviation_still_says_why() -> None:
    results = sample()
    results.rows[2].status, results.rows[2].deviation = "wrong", Deviation()
    assert "zero1: wrong: no reason was recorded" in table_text(results)


def test_clocks_that_heat_or_hands_hold_down_are_a_note() -> None:
    results = gpus()
    text = " ".join(table_text(results, width=220).split())
    assert "A thermal limit held GPU clocks down during ddp (33 % of the samples)." in text
    assert "power supply" not in text
    sampled = results.rows[1].sampled
    assert sampled is not None
    sampled.thermal_limit_pct, sampled.other_limit_pct = None, 100.0
    text = " ".join(table_text(results, width=220).split())
    assert (
        "(clocks set by hand, the power supply) held GPU clocks down during single (100 % of the samples)."
        in text
    )


def test_rows_verified_with_fewer_layers_are_named() -> None:
    results = gpus()
    assert "Verified with" not in table_text(results, width=220)
    for row in results.rows[2:4]:
        assert row.deviation is not None
        row.deviation.verified_layers = 2
    assert "Verified with 2 of 4 layers: zero0 and zero1." in table_text(results, width=220)
    for row in results.rows:
        if row.deviation is not None:
            row.deviation.verified_layers = 2
    assert "Verified with 2 of 4 layers: all rows." in table_text(results, width=220)


def test_rows_verified_with_all_experts_are_named() -> None:
    results = gpus()
    assert "all experts" not in table_text(results, width=220)
    assert results.rows[2].deviation is not None
    results.rows[2].deviation.verified_experts_per_token = 8
    assert "Verified with all experts for every token: zero0." in table_text(results, width=220)


def test_rows_whose_held_out_loss_is_far_from_the_others_are_named() -> None:
    results = gpus()
    floor, *others = [row for row in results.rows if row.status == "ok"]
    floor.validation_loss = 10.5
    settings = others[0].settings.model_copy(update={"world_size": 2})
    for row in others:
        row.settings = settings
        row.validation_loss = 3.3
    others[0].validation_loss = 3.4
    assert "Held-out loss" not in table_text(results, width=220)
    others[1].validation_loss = 10.4
    text = " ".join(table_text(results, width=220).split())
    assert f"with the same training (3.3 in the middle): {others[1].strategy} (10.4). Unless" in text
    optimizer = {**others[1].settings.optimizer, "lr": 0.5}
    for other in (
        {"num_steps": 1}, {"seed": 1}, {"clip": 0.5}, {"batch_size": 1}, {"world_size": 4}, {"grad_accum": 2},
        {"optimizer": optimizer},
    ):  # fmt: skip
        others[1].settings = settings.model_copy(update=other)
        assert "Held-out loss" not in table_text(results, width=220), other
    others[1].settings = settings.model_copy(update={"world_size": 1, "grad_accum": 2})
    assert "Held-out loss" in table_text(results, width=220)  # as many micro-batches
    others[1].validation_loss = 2.9  # lower is as far
    assert f"{others[1].strategy} (2.9). Unless" in " ".join(table_text(results, width=220).split())
    others[1].validation_loss = 0.9
    results.rows = others[:2]
    assert "Held-out loss" not in table_text(results, width=220)  # of two, which is far from the others?


def test_rows_whose_updates_fp16_skipped_are_named() -> None:
    results = gpus()
    for row in results.rows[2:4]:
        row.skipped_steps = 0
    assert "fp16 overflow" not in table_text(results, width=220)
    results.rows[3].skipped_steps = 2
    # Which of the two it was nobody knows.
    assert "skipped updates of zero1 (2), in measured steps or the last warm-up step; " in table_text(
        results, width=220
    )


def test_where_steps_are_of_different_sizes_rates_stay() -> None:
    def header(text: str) -> str:
        return next(line for line in text.splitlines() if line.startswith("strategy"))

    assert header(table_text(grid(), width=80)).split()[-3:] == ["step", "tokens", "peak"]
    assert header(table_text(sample(), width=40)).split()[-2:] == ["step", "peak"]


def test_outlying_steps_are_said_of_the_worst_of_many_rows() -> None:
    results = sample()
    for row, outlier_num in zip(results.rows, (1, 4, 2, 1, 1, 0, 0), strict=True):
        assert row.step_time_ms is not None
        row.step_time_ms.outliers = list(range(outlier_num))
    text = " ".join(table_text(results, width=220).split())
    assert "Outlying steps (kept): in 5 rows, most in zero0: 4 of 20." in text


def test_steps_that_still_changed_are_named_by_row_and_window() -> None:
    results = sample()
    names = [row.strategy for row in results.rows]

    def noted(row_num: int, step_num: int, samples: list[float]) -> str:
        for row in results.rows[:row_num]:
            assert row.step_time_ms is not None
            row.step_time_ms.samples, row.settings.num_steps = samples, step_num
        return " ".join(table_text(results, width=220).split())

    falling = [100.0 - 2 * step for step in range(20)]
    assert "still changed" not in noted(0, 20, falling)
    once = noted(1, 20, falling)
    assert (
        f"measured: {names[0]}, 96.0 ms in the first quarter of its steps and 66.0 ms in the last. The step time"
        in once
    )
    assert "still changed" not in noted(1, 5, falling)  # four repeats of five steps: too few to tell
    assert "still changed" not in noted(1, 20, [10.0] * 20 + [20.0] * 20)  # two repeats, each steady
    assert "in 5 rows, most in" in noted(5, 20, falling)


def test_a_note_is_of_a_column_that_is_there() -> None:
    results = gpus()
    texts = {left_out: [text for text, _ in note_lines(results, left_out)] for left_out in ((), ("MFU %",))}
    assert [any(text.startswith("MFU is relative to") for text in found) for found in texts.values()] == [
        True,
        False,
    ]


def test_the_peak_of_the_floor_is_compared_with_nothing() -> None:
    results = gpus()
    floor = results.rows[0]
    floor.settings.warmup_steps, floor.settings.num_steps = 0, 1
    assert "of the first step alone" not in table_text(results, width=220)


def test_the_floor_is_no_competitor(tmp_path: Path) -> None:
    results = gpus()
    floor = results.rows[0]
    against_others = (
        "relative", "relative_uncertainty", "speedup", "memory_change_pct", "baseline", "of_compute_only",
        "memory_explained_pct", "offload_practicality", "tokens_per_s_per_peak_gb",
    )  # fmt: skip
    assert floor.peak_device_bytes and {getattr(floor, name) for name in against_others} == {None}
    write_csv(results, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        of_floor, of_single, *_ = csv.DictReader(file)
    assert of_floor["strategy"] == "compute_only" and {of_floor[name] for name in against_others} == {""}
    assert of_single["tokens_per_s_per_peak_gb"]
    assert not any("compute_only" in sentence for sentence in advise(results))
    zero0 = next(row for row in results.rows if row.strategy == "zero0")
    assert floor.step_time_ms is not None and zero0.step_time_ms is not None
    assert zero0.of_compute_only == floor.step_time_ms.median / zero0.step_time_ms.median
    assert results.rows[-1].of_compute_only is None  # it did not run


def test_a_floor_that_its_host_made_slow_is_said_to_be_none() -> None:
    results = gpus()
    assert "took less time than compute_only" not in " ".join(table_text(results, width=220).split())
    floor = results.rows[0]
    zero0 = next(row for row in results.rows if row.strategy == "zero0")
    assert floor.step_time_ms is not None and zero0.step_time_ms is not None
    floor.step_time_ms.median = 1.03 * zero0.step_time_ms.median
    floor.device_busy_pct = 37.5
    busier = floor.model_copy(deep=True)
    busier.name, busier.settings.batch_size, busier.device_busy_pct = "busier", 3, 90.0
    results.rows.append(busier)
    finish_rows(results)
    text = next(text for text, _ in note_lines(results, []) if "took less time than" in text)
    names, _, rest = text.partition(" took less time than compute_only ")
    assert "zero0" in names and "ddp" not in names
    assert rest.startswith("(its GPU was busy 38 % of the time)")


def test_less_time_than_the_floor_by_chance_is_not_said() -> None:
    def is_said(floor_ms: float, *, spread: float, step_num: int) -> bool:
        results = gpus()
        floor = results.rows[0]
        for row in results.rows:
            if row.step_time_ms is not None:
                median_ms = floor_ms if row is floor else 100.0 if row.strategy == "zero0" else 200.0
                samples = [median_ms * (1 + spread * sign) for sign in (0, 1, -1, 1, -1)] * step_num
                row.step_time_ms = summarise(samples[:step_num])
        finish_rows(results)
        zero0 = next(row for row in results.rows if row.strategy == "zero0")
        assert zero0.of_compute_only == floor_ms / 100.0
        return any("zero0 took less time than compute_only" in text for text, _ in note_lines(results, []))

    assert is_said(104.0, spread=0.01, step_num=20)
    assert not is_said(101.0, spread=0.0001, step_num=20)  # nothing notable
    assert not is_said(104.0, spread=0.1, step_num=20)
    assert not is_said(104.0, spread=0.01, step_num=5)  # who knows


def test_a_floor_of_other_settings_is_none() -> None:
    for key, value in (
        ("compile", "none"),
        ("batch_size", 4),
        ("grad_accum", 2),
        ("tf32", True),
        ("dropout", 0.1),
        ("checkpointing", True),
    ):
        results = gpus()
        setattr(results.rows[0].settings, key, value)
        finish_rows(results)
        assert {row.of_compute_only for row in results.rows} == {None}, key
    results = gpus()
    results.rows[0].status = "failed"  # in a repeat, say
    finish_rows(results)
    assert {row.of_compute_only for row in results.rows} == {None}


def test_a_floor_on_other_ranks_serves_gpus_alone_and_only_where_there_is_none_on_the_same() -> None:
    results = gpus()
    floor, zero0 = results.rows[0], next(row for row in results.rows if row.strategy == "zero0")
    single = next(row for row in results.rows if row.strategy == "single")
    assert floor.step_time_ms and zero0.step_time_ms and single.step_time_ms
    assert single.of_compute_only == floor.step_time_ms.median / single.step_time_ms.median
    of_one = floor.model_copy(deep=True)
    of_one.name, of_one.settings.world_size = "alone", 1
    assert of_one.step_time_ms is not None
    of_one.step_time_ms.median *= 0.5
    for rows in ([of_one, *results.rows], [*results.rows, of_one]):
        results.rows = rows
        finish_rows(results)
        assert zero0.of_compute_only == floor.step_time_ms.median / zero0.step_time_ms.median
        assert single.of_compute_only == of_one.step_time_ms.median / single.step_time_ms.median
        rows.remove(of_one)
    for row in results.rows:
        row.settings.device = "cpu"
    finish_rows(results)
    assert zero0.of_compute_only is not None and single.of_compute_only is None


def test_compiled_rows_are_held_against_the_compiled_baseline() -> None:
    results = gpus()
    eager = next(row for row in results.rows if row.strategy == "ddp").model_copy(deep=True)
    eager.name, eager.settings.compile = "ddp_eager", "none"
    results.rows.append(eager)
    finish_rows(results)
    by_name = {row.name: row for row in results.rows}
    zero0 = next(row for row in results.rows if row.strategy == "zero0")
    assert zero0.baseline is not None and by_name[zero0.baseline].settings.compile == "block"
    assert eager.baseline == "ddp_eager"


def test_the_settings_are_those_of_rows_that_ran() -> None:
    """A first row that did not run has no communicator, and as many threads as were planned for it."""
    results = sample()
    first, *others = results.rows
    first.status, first.step_time_ms, first.settings.threads_per_rank = "oom", None, 2
    for row in others:
        row.settings.communicator, row.settings.threads_per_rank = "shm", 1
    text = " ".join(table_text(results, width=400).split())
    assert "communicator shm · torch threads/rank 1 " in text and "threads/rank 2" not in text


def test_a_row_that_did_not_run_is_not_said_to_have_no_communicator() -> None:
    results = sample()
    results.rows = results.rows[1:3]
    for row in list(results.rows):
        twin = row.model_copy(deep=True)
        twin.name, twin.settings.communicator = f"{row.name}_c10d", "c10d"
        results.rows.append(twin)
    last = results.rows[-1]
    last.status, last.step_time_ms, last.error = "failed", None, "no"
    last.settings.communicator = None
    text = table_text(results, width=200)
    assert "communicator none" not in text and "zero1: failed: no" in text
    line = next(line for line in text.splitlines() if line.startswith("zero1") and "failed" in line)
    assert line.split()[:3] == ["zero1", "-", "failed"]
