"""Published figures next to ours."""

from __future__ import annotations

import csv
import io

import pytest
from report_samples import sample

from zerobench.recipes.published import COLUMNS, csv_text, is_alike, pairs_of, table_text
from zerobench.recipes.references import read_references
from zerobench.report import summarise
from zerobench.results.runs import set_runs
from zerobench.results.schema import Results, Row, Run

STUDY = "DeepSpeed ZeRO stages with GPT-2 on one H100 NVL"


def as_published(row: Row) -> Row:
    """Give a row the settings of the study and round figures."""
    row.settings = row.settings.model_copy(
        update={"model": "gpt2", "precision": "fp16", "batch_size": 32, "seq_length": 128, "world_size": 1}
    )
    row.step_time_ms = summarise([100.0, 300.0] * 4)
    row.peak_device_bytes, row.device_utilisation_pct = 3_798_000_000, 44.755
    set_runs(row, [Run(step_time_ms=200.0, tokens_per_s=rate) for rate in (20000.0, 21000.0)])
    return row


def results_of(*strategies: str) -> Results:
    results = sample()
    results.rows = [row for row in results.rows if row.strategy in strategies]
    for row in results.rows:
        as_published(row)
    return results


def test_a_row_stands_next_to_the_published_one_of_its_stage() -> None:
    pairs = pairs_of(results_of("zero0"), [STUDY])
    assert len(pairs) == 48
    ours = {pair.reference.figure: pair for pair in pairs if pair.row is not None}
    assert {pair.reference.id for pair in ours.values()} == {"h100nvl-fp16-zero0"} and len(ours) == 6
    assert ours["throughput, median"].ours == pytest.approx(4096 / 0.2)
    assert ours["throughput, standard deviation"].ours == pytest.approx(707.1, rel=1e-3)
    assert ours["step time, mean"].ours == pytest.approx(0.2)
    assert ours["peak GPU memory"].ratio == pytest.approx(0.5)
    assert ours["GPU utilisation"].ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"}, {"batch_size": 16}, {"seq_length": 64}, {"model": "tiny"}, {"world_size": 2},
        {"offload": "cpu_optimizer"}, {"compile": "block"}, {"grad_accum": 2},
    ],
)  # fmt: skip
def test_other_settings_are_another_row(change: dict[str, object]) -> None:
    (row,) = results_of("zero3").rows
    reference = next(each for each in read_references() if each.id == "h100nvl-fp16-zero3")
    assert is_alike(row, reference)
    row.settings = row.settings.model_copy(update=change)
    assert not is_alike(row, reference)


def test_a_figure_that_names_no_model_stands_alone() -> None:
    (row,) = results_of("zero3").rows
    reference = next(each for each in read_references() if each.id == "h100nvl-fp16-zero3")
    assert not is_alike(row, reference.model_copy(update={"model": None}))
    assert not is_alike(row, reference.model_copy(update={"strategy": "cpu_optimizer"}))
    row.settings = row.settings.model_copy(update={"offload": "cpu_optimizer"})
    assert is_alike(row, reference.model_copy(update={"strategy": "cpu_optimizer"}))


def test_a_published_row_without_ours_is_shown_all_the_same() -> None:
    pairs = pairs_of(sample(), [STUDY])
    assert len(pairs) == 48 and all(pair.row is None and pair.ratio is None for pair in pairs)
    assert len(table_text(pairs).splitlines()) == 1 + 48


def test_the_file_has_the_source_of_each_figure() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(pairs_of(results_of("zero0"), [STUDY])))))
    assert list(lines[0]) == list(COLUMNS) and len(lines) == 48
    assert all(line["source"] and line["published"] for line in lines)
    assert [line["row"] != "" for line in lines].count(True) == 6
