"""Result files: schema, frames, CSV; and what importing the report costs."""

from __future__ import annotations

import csv
import errno
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from report_samples import SAMPLE, mixed, sample
from rich.console import Console

from zerobench.bench.show import show as show_results
from zerobench.cli.main import show
from zerobench.errors import DataError
from zerobench.report import (
    advise,
    load,
    read_results,
    write_csv,
    write_plots,
)
from zerobench.report.phases import phases_change_pct
from zerobench.results.files import replace_file
from zerobench.results.schema import SCHEMA_VERSION, Results


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
        ("[]", "is not a zerobench result file: the file"),
        ('{"created": 3}', "is not a zerobench result file: created"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("1" * 10_000, "is not a zerobench result file"),
        ("[" * 100_000, "is not a zerobench result file"),
    ],
)
def test_files_that_cannot_serve(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "results.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("relative",), -1.0),
        (("relative",), 0.0),
        (("relative_uncertainty",), -0.1),
        (("rank_step_times_ms",), [0.0, 1.0]),
        (("step_time_ms", "median"), 0.0),
        (("step_time_ms", "samples"), []),
        (("settings", "num_steps"), 0),
        (("settings", "world_size"), 0),
    ],
)
def test_figures_that_cannot_be_are_refused_by_name(
    tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    content = json.loads(SAMPLE.read_text())
    found = content["rows"][2]
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=rf"is not a zerobench result file: rows\.2\.{re.escape('.'.join(place))}"
    ):
        load(tmp_path)


def test_what_older_versions_told_from_too_few_steps_is_not_told_again(tmp_path: Path) -> None:
    results = sample()
    *_, first, last = results.rows
    for row in (first, last):
        assert row.step_time_ms is not None
        row.step_time_ms.samples, row.step_time_ms.outliers = row.step_time_ms.samples[:5], [0]
        row.relative_uncertainty = 0.001
    (tmp_path / "results.json").write_text(results.model_dump_json())
    found = read_results(tmp_path).rows
    assert [row.relative_uncertainty for row in found[-2:]] == [None, None]
    assert all(row.step_time_ms is not None and not row.step_time_ms.outliers for row in found[-2:])
    assert found[1].relative_uncertainty == results.rows[1].relative_uncertainty is not None
    advice = advise(read_results(tmp_path))
    assert "5 measured steps tell too little" in advice[0]
    best = next(row for row in results.rows if row.relative == 1.0)
    assert best.step_time_ms is not None
    best.step_time_ms.samples = best.step_time_ms.samples[:5]
    (tmp_path / "results.json").write_text(results.model_dump_json())
    assert all(row.relative_uncertainty is None for row in read_results(tmp_path).rows)


def test_file_of_a_newer_schema(tmp_path: Path) -> None:
    newer = SCHEMA_VERSION + 1
    content = json.loads(SAMPLE.read_text()) | {"schema_version": newer, "rows": {"by": "name"}}
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"schema_version {newer} .* upgrade"):
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


def test_frame_has_phases_in_per_cent_and_against_the_baselines() -> None:
    frame = load(SAMPLE).set_index("strategy")
    rows = {row.strategy: row for row in sample().rows}
    phases, of_ddp = rows["zero3"].phases_ms, rows["ddp"].phases_ms
    assert phases is not None and of_ddp is not None and rows["zero3"].baseline == rows["ddp"].name
    shares = frame.loc["zero3", [f"phases_pct.{phase}" for phase in phases]]
    assert sum(shares) == pytest.approx(100.0)
    assert shares["phases_pct.forward"] == pytest.approx(100 * phases["forward"] / sum(phases.values()))
    change = frame["phases_change_pct.forward"]
    assert change["zero3"] == pytest.approx(100 * (phases["forward"] / of_ddp["forward"] - 1))
    assert change["ddp"] == 0.0


def test_phases_are_held_against_the_baselines_per_token_of_a_rank() -> None:
    rows = {row.strategy: row for row in sample().rows}
    row, base = rows["zero3"], rows["ddp"]
    row.settings.grad_accum = 2 * base.settings.grad_accum
    row.settings.world_size = 4 * base.settings.world_size
    row.phases_ms = {"forward": 30.0, "optimizer": 3.0, "host_bound": 2.0}
    base.phases_ms = {"forward": 10.0, "optimizer": 0.05}  # the optimizer's share is noise
    assert phases_change_pct(row, [row, base]) == {"forward": pytest.approx(50.0)}
    row.baseline = None
    assert phases_change_pct(row, [row, base]) == {}


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
    # A list has no column, also where the first row of it did not run.
    assert not {"loss", "step_time_ms.samples", "rank_step_times_ms", "binding", "sampled.shared_gpus"} & {
        *records[0]
    }


def test_a_category_that_another_row_has_is_an_empty_cell(tmp_path: Path) -> None:
    results = sample()
    results.rows[1].memory_bytes = {"nvme": {"master": 7}}
    write_csv(results, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        cells = [record["memory_bytes.nvme.master"] for record in csv.DictReader(file)]
    assert cells == ["", "7", *[""] * 5]


@pytest.mark.parametrize("end", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path, end: BaseException) -> None:
    target = tmp_path / "results.csv"
    target.write_text("old")

    def write_half(path: Path) -> None:
        path.write_text("ha")
        raise end

    with pytest.raises(type(end)):
        replace_file(target, write_half)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


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
from zerobench.report import (advise, finish_rows, load, median_of_ratios, read_results, render_table,
    summarise, table_text, write_csv, write_plots, Ratio)
assert not heavy & set(sys.modules), heavy & set(sys.modules)
results = read_results(sys.argv[1])
finish_rows(results), advise(results), table_text(results)
assert not {"torch", "pandas", "matplotlib", "zerobench._core"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(SAMPLE)], check=True, timeout=120)


def test_what_looks_like_markup_in_a_path_or_name_is_shown_as_it_is(tmp_path, capsys) -> None:
    folder = tmp_path / "out[bold] :bell:[" / "x]"
    folder.mkdir(parents=True)
    results = sample()
    for row in results.rows:
        row.settings.model = "m[/x] :bell:"
    (folder / "results.json").write_text(results.model_dump_json())
    show([folder])
    shown = capsys.readouterr().out
    assert str(folder / "plots" / "memory.png") in shown
    assert "Based on 7 rows, 1 run each: m[/x] :bell: (" in shown


@pytest.mark.parametrize("width", [10, 20, 29])
def test_no_terminal_is_too_narrow_for_whole_figures(width) -> None:
    results, text = sample(), io.StringIO()
    show_results(results, Console(file=text, width=width))
    shown = text.getvalue()
    for row in results.rows:
        time = row.step_time_ms
        assert time is not None
        assert re.search(rf"\b{row.strategy} +ok +{time.median:.1f} ± {time.mad:.1f}$", shown, re.MULTILINE)


def test_showing_no_rows_says_so(tmp_path, capsys) -> None:
    results = sample()
    results.rows = []
    (tmp_path / "results.json").write_text(results.model_dump_json())
    show([tmp_path])
    assert "no rows yet" in capsys.readouterr().out
