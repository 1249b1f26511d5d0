"""Frames, tables, plots and advice from result files.

Run this file as a program to write the golden tables anew after a wanted change, then read the difference."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pandas
import pytest

from zerobench.bench.result import Deviation, Mfu, Results, Row, Sampled
from zerobench.errors import DataError
from zerobench.report import (
    advise,
    finish_rows,
    load,
    read_results,
    render_table,
    summarise,
    table_text,
    write_csv,
    write_plots,
)

GOLDEN = Path(__file__).parent / "golden"
SAMPLE = GOLDEN / "results_sample.json"


def sample() -> Results:
    return read_results(SAMPLE)


def mixed() -> Results:
    """Every status, other dtypes, an unequal checksum, phases that are missing, a comparison cut short."""
    results = sample()
    rows = {row.strategy: row for row in results.rows}
    for strategy, status, error in (
        ("zero2", "oom", "rank 1 asked for 12.4 GiB of exp_avg and 7.9 GiB were free"),
        ("ddp", "failed", "rank 1 was killed by signal 9 in step 3"),
        ("fsdp2", "skipped", "fsdp2 needs at least 2 ranks"),
    ):
        replaced = Row(
            name=rows[strategy].name,
            strategy=strategy,
            status=status,  # type: ignore[arg-type]
            error=error,
            settings=rows[strategy].settings,
        )
        results.rows[results.rows.index(rows[strategy])] = replaced
    wrong = rows["zero1"]
    assert wrong.deviation is not None and rows["zero3"].dtypes is not None
    wrong.status, wrong.checksum = "wrong", "f00d"
    wrong.deviation.update = 0.38
    wrong.deviation.verdict = "update deviates by 0.38 (allowed 0.15)"
    rows["zero3"].comparable = False
    rows["zero3"].dtypes.reduce = "float32"
    rows["zero0"].phases_ms = None
    results.complete = False
    results.warnings = ["Another program used 63 % of the processors before the first row."]
    finish_rows(results)
    return results


def grid() -> Results:
    """Two precisions by two batch sizes."""
    results = sample()
    rows = []
    for precision, factor in (("fp32", 2.0), ("bf16", 1.0)):
        for batch_size in (8, 16):
            for row in sample().rows:
                assert row.step_time_ms is not None and row.peak_device_bytes is not None
                row.settings.precision, row.settings.batch_size = precision, batch_size
                row.name = f"{row.strategy}_{precision}_bs{batch_size}"
                scale = factor * (batch_size / 8) ** 0.9
                row.step_time_ms = summarise([scale * x for x in row.step_time_ms.samples])
                row.tokens_per_s = (row.tokens_per_s or 0.0) * batch_size / 8 / scale
                row.peak_device_bytes += (batch_size - 8) * 1_500_000
                rows.append(row)
    results.rows = rows
    finish_rows(results)
    return results


def gpus() -> Results:
    """As on GPUs: a floor, utilisation, power, compiled graphs, phases with the host's share, memory that ran out."""
    results = sample()
    results.machine = {
        **results.machine,
        "gpus": [{"name": "NVIDIA H200"}] * 4,
        "driver": "580.82.07",
        "cuda": "13.0",
    }
    floor = results.rows[0].model_copy(deep=True)
    floor.name, floor.strategy = "compute_only_bf16_gpus1_bs8_sl512", "compute_only"
    floor.settings.world_size, floor.deviation, floor.checksum = 1, None, None
    results.rows.insert(0, floor)
    for row in results.rows:
        assert row.step_time_ms is not None and row.phases_ms is not None
        row.settings.device, row.settings.compile, row.settings.attention = "cuda", "block", "sdpa"
        if row is floor:
            row.step_time_ms = summarise([0.8 * x for x in row.step_time_ms.samples])
        row.compiled_graphs = 24.0
        row.phases_ms = {**row.phases_ms, "host_bound": 1.25}
        row.sampled = Sampled(sample_num=9, power_w=612.4, shared_gpus=[1] if row.strategy == "zero1" else [])
        row.mfu = Mfu(
            pct=41.26,
            tflops_per_gpu=408.2,
            peak_tflops=989.4,
            peak_of="NVIDIA H200, bf16 dense",
            flops_per_token=8e8,
        )
    last = results.rows[-1]
    last.status, last.error, last.oom_tier = "oom", "rank 0: OutOfMemoryError: CUDA out of memory", "device"
    finish_rows(results)
    return results


GOLDEN_TABLES = {
    "table_gpus_190.txt": (gpus, 190),
    "table_gpus_100.txt": (gpus, 100),
    "table_sample_80.txt": (sample, 80),
    "table_sample_100.txt": (sample, 100),
    "table_sample_150.txt": (sample, 150),
    "table_mixed_80.txt": (mixed, 80),
    "table_mixed_120.txt": (mixed, 120),
    "table_grid_120.txt": (grid, 120),
}


# Files and frames


def test_schema_round_trip() -> None:
    results = mixed()
    text = results.model_dump_json()
    assert Results.model_validate_json(text) == results
    assert json.loads(text)["rows"][3]["step_time_ms"] is None  # what cannot be had is null


def test_fields_of_newer_files_are_kept(tmp_path: Path) -> None:
    content = json.loads(SAMPLE.read_text())
    content["rows"][0]["energy_j"] = 12.5
    content["rows"][0]["step_time_ms"]["p99"] = 130.0
    (tmp_path / "results.json").write_text(json.dumps(content))
    frame = load(tmp_path)
    assert frame["energy_j"][0] == 12.5 and pandas.isna(frame["energy_j"][1])
    assert frame["step_time_ms.p99"][0] == 130.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"does not exist: give a results\.json"),
        ("{", "is not a zerobench result file"),
        ('{"created": 3}', "is not a zerobench result file: created"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_files_that_cannot_serve(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_file_of_a_newer_schema(tmp_path: Path) -> None:
    content = json.loads(SAMPLE.read_text()) | {"schema_version": 99}
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"schema_version 99 .* upgrade"):
        load(tmp_path)


def test_frame_is_flat() -> None:
    frame = load(SAMPLE)
    rows = {row.strategy: row for row in sample().rows}
    zero3 = frame[frame["strategy"] == "zero3"].iloc[0]
    time, memory = rows["zero3"].step_time_ms, rows["zero3"].memory_bytes
    assert time is not None and memory is not None
    assert zero3["step_time_ms.median"] == time.median
    assert zero3["step_time_ms.samples"] == time.samples
    assert zero3["settings.batch_size"] == 8
    assert zero3["settings.model_config_resolved.hidden_size"] == 128
    assert zero3["memory_bytes.device.parameters"] == memory["device"]["parameters"]
    assert zero3["phases_ms.exposed_communication"] == 13.2
    single = frame[frame["strategy"] == "single"].iloc[0]
    assert pandas.isna(single["phases_ms.exposed_communication"])  # absent, not zero
    assert frame["tokens_per_s"].dtype == float
    assert "source" not in frame.columns
    assert frame.attrs["results"][str(SAMPLE)]["versions"]["torch"] == "2.13.0"


def test_frame_of_rows_without_measurements_has_the_same_columns(tmp_path: Path) -> None:
    results = sample()
    results.rows = [row for row in mixed().rows if row.status in ("oom", "failed")]
    (tmp_path / "results.json").write_text(results.model_dump_json())
    frame = load(tmp_path)
    assert frame["step_time_ms.median"].isna().all() and len(frame) == 2
    assert "step_time_ms" not in frame.columns and "deviation.update" in frame.columns
    results.rows = []
    (tmp_path / "results.json").write_text(results.model_dump_json())
    frame = load(tmp_path)
    assert len(frame) == 0 and "step_time_ms.median" in frame.columns


def test_several_paths_carry_their_source(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(mixed().model_dump_json())
    for frame in (load(SAMPLE, tmp_path), load([SAMPLE, tmp_path])):
        assert list(frame["source"].unique()) == [str(SAMPLE), str(tmp_path)]
        assert len(frame) == 14
        assert len(frame.attrs["results"]) == 2


def test_csv_is_the_summary(tmp_path: Path) -> None:
    results = mixed()
    write_csv(results, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    assert [record["status"] for record in records] == [row.status for row in results.rows]
    first, oom = records[0], records[3]
    assert float(first["step_time_ms.median"]) == results.rows[0].step_time_ms.median  # type: ignore[union-attr]
    assert oom["step_time_ms.median"] == "" and oom["peak_device_bytes"] == ""
    assert "step_time_ms.samples" not in first and "loss" not in first
    assert first["settings.precision"] == "bf16"
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "results.csv").mkdir()  # a folder stands where the file should go
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "step_time.png").mkdir()
    with pytest.raises(OSError, match=r"results\.csv"):
        write_csv(sample(), tmp_path / "results.csv")
    with pytest.raises(OSError, match=r"step_time\.png"):
        write_plots(sample(), tmp_path / "plots")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_report_imports_are_light() -> None:
    code = """
import sys, zerobench.report
heavy = {"torch", "pandas", "matplotlib", "rich", "numpy", "zerobench._core"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from zerobench.report import (advise, finish_rows, load, median_of_ratios, ratio_of_medians, read_results,
    render_table, summarise, table_text, write_csv, write_plots, Ratio)
assert not heavy & set(sys.modules), heavy & set(sys.modules)
results = read_results(sys.argv[1])
finish_rows(results), advise(results), table_text(results)
assert not {"torch", "pandas", "matplotlib", "zerobench._core"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(SAMPLE)], check=True, timeout=120)


# The table


@pytest.mark.parametrize("name", GOLDEN_TABLES)
def test_golden_tables(name: str) -> None:
    make, width = GOLDEN_TABLES[name]
    text = table_text(make(), width=width)
    assert text == (GOLDEN / name).read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", range(60, 200, 7))
@pytest.mark.parametrize("make", [sample, mixed])
def test_no_width_breaks_a_number(make, width: int) -> None:  # type: ignore[no-untyped-def]
    results = make()
    text = table_text(results, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    row = results.rows[0]
    assert f"{row.step_time_ms.median:.1f} ± {row.step_time_ms.mad:.1f}" in text
    assert f"{row.peak_device_bytes / 2**20:.1f}" in text


def test_wrong_rows_show_no_number_but_their_deviation() -> None:
    results = mixed()
    line = next(line for line in table_text(results, width=180).splitlines() if line.startswith("zero1"))
    assert line.split()[:2] == ["zero1", "wrong"]
    assert [word for word in line.split()[2:] if word[0].isdigit()] == ["3.8e-01"]


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


# Advice


def test_advice_on_the_sample() -> None:
    fastest, memory, basis = advise(sample())
    assert (
        fastest.startswith("zero2 and zero1 tie as the fastest of 7 correct rows")
        and "below the noise" in fastest
    )
    assert memory.startswith("Within 10 % of the fastest, zero3 needs the least memory: 19.5 MiB peak")
    assert (
        "7 rows" in basis and "0.934 M parameters" in basis and "2 ranks" in basis and "20 measured" in basis
    )


def test_advice_names_one_where_the_difference_is_clear() -> None:
    results = sample()
    results.rows[4].step_time_ms = summarise([60.0, 60.5, 59.5, 60.2, 59.8])
    finish_rows(results)
    assert advise(results)[0].startswith("zero3 is the fastest of 7 correct rows: 34,133 tokens/s")
    assert (
        advise(results)[1] == "No row within 10 % of zero3 needs notably less memory than its 19.5 MiB peak."
    )


def test_advice_never_names_wrong_or_incomparable_rows() -> None:
    results = mixed()
    for row in results.rows:
        if row.strategy in ("zero1", "zero3"):
            row.step_time_ms, row.peak_device_bytes = summarise([1.0] * 5), 1000
    finish_rows(results)
    text = " ".join(advise(results))
    assert "zero0 is the fastest of 2 correct rows" in text
    assert "zero1" not in text and "zero3" not in text


def test_advice_says_when_sharding_buys_nothing() -> None:
    results = sample()
    for row in results.rows:
        row.peak_device_bytes = 1_000_000_000 + (row.peak_device_bytes or 0)
    finish_rows(results)
    assert any(text.startswith("Sharding buys little memory here") for text in advise(results))
    assert not any("Sharding buys" in text for text in advise(sample()))


def test_advice_says_when_ranks_buy_nothing() -> None:
    results = sample()
    results.rows[0].step_time_ms = summarise([50.0, 50.5, 49.5])
    finish_rows(results)
    assert any(
        text.startswith("More ranks buy no speed here: single on one rank") for text in advise(results)
    )


def test_advice_on_one_rank() -> None:
    results = sample()
    for row in results.rows:
        row.settings.world_size = 1
    finish_rows(results)
    assert any("nothing to shard" in text for text in advise(results))


def test_advice_by_workload() -> None:
    fp32, bf16 = advise(grid())
    assert fp32.startswith("fp32: zero2, batch 16 and zero1, batch 16 tie") and bf16.startswith("bf16: ")


# Plots


@pytest.mark.parametrize("make", [sample, mixed, grid])
def test_plots_are_images(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    paths = write_plots(make(), tmp_path / "plots")
    assert [path.name for path in paths] == ["step_time.png", "memory.png", "speed_memory.png"]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {path.name for path in paths}
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image.shape[1] >= 1000 and image[..., :3].mean() > 0.6  # light background
        assert image[..., :3].std() > 0.02  # something is drawn


def test_plots_of_one_row_and_of_none(tmp_path: Path) -> None:
    results = sample()
    results.rows = results.rows[2:3]
    assert len(write_plots(results, tmp_path)) == 3
    results.rows[0].status = "failed"
    assert write_plots(results, tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    results.rows = []
    assert write_plots(results, tmp_path / "nothing") == []


def test_bars_end_at_the_median_and_the_peak() -> None:
    from zerobench.report.plots import memory_figure, step_time_figure

    results = mixed()
    figure = step_time_figure(results)
    assert figure is not None
    widths = [0.0] * len(results.rows)
    for patch in figure.axes[0].patches:
        widths[round(patch.get_y() + patch.get_height() / 2)] += patch.get_width()
    expected = [
        row.step_time_ms.median if row.status == "ok" and row.step_time_ms else 0.0 for row in results.rows
    ]
    assert widths == pytest.approx(expected)

    figure = memory_figure(results)
    assert figure is not None
    ends = [0.0] * len(results.rows)
    for patch in figure.axes[0].patches:
        index = round(patch.get_y() + patch.get_height() / 2)
        ends[index] = max(ends[index], patch.get_x() + patch.get_width())
    peaks = [(row.peak_device_bytes or 0) / 2**20 if row.status == "ok" else 0.0 for row in results.rows]
    assert ends == pytest.approx(peaks)


def test_no_two_labels_overlap() -> None:
    from zerobench.report.scatter import speed_memory_figure

    figure = speed_memory_figure(grid())
    assert figure is not None
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
        assert len(boxes) > 5
        for index, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_pareto_front() -> None:
    from zerobench.report.scatter import Point, pareto_front

    points = [
        Point("small", 1.0, 10.0, True),
        Point("beaten", 2.0, 9.0, True),
        Point("fast", 3.0, 20.0, True),
        Point("same memory, slower", 3.0, 19.0, True),
        Point("other dtypes", 0.5, 30.0, False),
    ]
    assert [point.label for point in pareto_front(points)] == ["small", "fast"]


def test_wrong_row_without_a_deviation_still_says_why() -> None:
    results = sample()
    results.rows[2].status, results.rows[2].deviation = "wrong", Deviation()
    assert "zero1: wrong: no reason was recorded" in table_text(results)


# Rows of GPU machines


def test_the_floor_is_no_competitor() -> None:
    results = gpus()
    floor = results.rows[0]
    assert floor.relative is None and floor.speedup is None and floor.of_compute_only is None
    assert not any("compute_only" in sentence for sentence in advise(results))
    zero0 = next(row for row in results.rows if row.strategy == "zero0")
    assert floor.step_time_ms is not None and zero0.step_time_ms is not None
    assert zero0.of_compute_only == floor.step_time_ms.median / zero0.step_time_ms.median
    assert results.rows[-1].of_compute_only is None  # it did not run


def test_a_floor_of_other_settings_is_none() -> None:
    for key, value in (("compile", "none"), ("batch_size", 4), ("grad_accum", 2), ("tf32", True)):
        results = gpus()
        setattr(results.rows[0].settings, key, value)
        finish_rows(results)
        assert {row.of_compute_only for row in results.rows} == {None}


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


if __name__ == "__main__":
    for golden_name, (make_results, golden_width) in GOLDEN_TABLES.items():
        (GOLDEN / golden_name).write_text(table_text(make_results(), width=golden_width), encoding="utf-8")
