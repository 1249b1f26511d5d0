"""benchmarks/targets.py: which rows a target is judged by, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import targets
from report_samples import sample

from zerobench.report import finish_rows, summarise
from zerobench.results.schema import Results, Row

RATES = {"compute_only": 100.0, "zero1": 103.0, "zero3": 106.0, "fsdp2": 120.0, "ddp_master": 115.0}


def llama(
    step_ms: dict[str, float] = RATES, *, compile_mode: str = "none", peak_bytes: int = 1 << 30
) -> Results:
    results = sample()
    pattern = next(row for row in results.rows if row.strategy == "zero1")
    results.rows = []
    for strategy, median in step_ms.items():
        row = pattern.model_copy(deep=True)
        row.name = row.strategy = strategy
        found = row.settings
        found.model, found.precision, found.compile = "llama-1.3b", "bf16", compile_mode
        found.batch_size, found.seq_length, found.world_size = 4, 2048, 4
        row.step_time_ms = summarise([median - 0.5, median, median, median + 0.5] * 2)
        row.peak_device_bytes = peak_bytes
        results.rows.append(row)
    finish_rows(results)
    return results


def row_of(results: Results, strategy: str) -> Row:
    return next(row for row in results.rows if row.strategy == strategy)


def ratios(results: Results) -> dict[tuple[str, str, str], float]:
    found = [judged for target in targets.TARGETS if (judged := targets.judge(results, target))]
    return {(j.ours.strategy, j.beside.strategy, j.target.of): j.ratio for j in found}


def test_ours_stands_beside_the_fastest_peer_and_the_floor() -> None:
    found = ratios(llama())
    assert found == {
        ("zero1", "ddp_master", "rate"): pytest.approx(115 / 103),
        ("zero3", "ddp_master", "rate"): pytest.approx(115 / 106),
        ("zero1", "compute_only", "rate"): pytest.approx(100 / 103),
        ("zero3", "compute_only", "rate"): pytest.approx(100 / 106),
        ("zero3", "fsdp2", "memory"): 1.0,
    }


def test_only_right_rows_of_the_same_ranks_and_workload_count() -> None:
    results = llama()
    row_of(results, "ddp_master").status = "wrong"
    row_of(results, "compute_only").settings.world_size = 1
    row_of(results, "zero3").settings.seq_length = 1024
    assert ratios(results) == {("zero1", "fsdp2", "rate"): pytest.approx(120 / 103)}
    without = targets.missing(results, targets.TARGETS[0])
    assert "ddp_master (wrong)" in without and "mfsdp3 (no row)" in without
    assert not any(name.startswith("fsdp2 ") for name in without)


def test_a_smaller_peak_is_more() -> None:
    results = llama()
    row_of(results, "zero3").peak_device_bytes = 2 << 30
    assert ratios(results)["zero3", "fsdp2", "memory"] == 0.5


def test_compiled_rows_are_judged_by_block_beside_peers_of_either_mode() -> None:
    results = llama(compile_mode="block")
    whole = llama({"fsdp2": 110.0, "deepcompile3_both": 150.0, "compute_only": 90.0}, compile_mode="whole")
    results.rows += whole.rows
    assert ratios(results) == {
        ("zero1", "fsdp2", "rate"): pytest.approx(110 / 103),
        ("zero3", "fsdp2", "rate"): pytest.approx(110 / 106),
        ("zero1", "deepcompile3_both", "rate"): pytest.approx(150 / 103),
        ("zero3", "deepcompile3_both", "rate"): pytest.approx(150 / 106),
        ("zero1", "compute_only", "rate"): pytest.approx(100 / 103),
        ("zero3", "compute_only", "rate"): pytest.approx(100 / 106),
    }


@pytest.mark.parametrize(
    ("step_ms", "code"),
    [(RATES | {"zero3": 104.0}, 0), (RATES, 1), ({"zero1": 103.0}, 2)],
    ids=["met", "missed", "nothing to judge"],
)
def test_the_exit_status_tells_of_all_files(tmp_path: Path, capsys, step_ms, code) -> None:
    (tmp_path / "results.json").write_text(llama(step_ms).model_dump_json())
    output = tmp_path / "targets.md"
    assert targets.main([str(tmp_path), "--output", str(output)]) == code
    assert "targets have no rows in these files" in capsys.readouterr().err
    assert output.exists() == (code != 2)
    if code == 1:
        text = output.read_text()
        assert "| zero3 (106.0 ms) | compute_only (100.0 ms) | 0.943 ± 0.002 | 0.95 | missed |  |" in text
        assert (
            "| zero1 (103.0 ms) | ddp_master (115.0 ms) | 1.117 ± 0.002 | 1.05 | met | ddp (no row), " in text
        )
