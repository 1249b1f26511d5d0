"""`zerobench advise`: goals, the memory limit, JSON, and names that look like markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from advice_samples import phases, results_of, row
from report_samples import SAMPLE, gpus, mixed
from typer.testing import CliRunner

from zerobench.cli import main as cli
from zerobench.errors import ConfigError
from zerobench.export.chosen import chosen_row
from zerobench.page.write import page_text
from zerobench.report.advice.advise import advice_on
from zerobench.report.advice.goals import GOALS, advised_row
from zerobench.results.files import read_results
from zerobench.results.rows import by_workload, is_ranked, tokens_per_step
from zerobench.results.schema import Results, Row
from zerobench.results.sizes import GIB

ROOT = Path(__file__).parents[2]
COMMITTED = [SAMPLE, *sorted((ROOT / "benchmarks").rglob("results.json"))]


def run(folder: Path, results: Results, *arguments: str) -> str:
    """Return what the command prints on these results."""
    path = folder / "results.json"
    path.write_text(results.model_dump_json(), encoding="utf-8")
    found = CliRunner().invoke(cli.app, ["advise", str(path), *arguments], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def figure(goal: str, found: Row) -> float:
    """Return what the goal minimises, computed from the file alone."""
    assert found.step_time_ms is not None
    return {
        "throughput": found.step_time_ms.median / tokens_per_step(found),
        "step-time": found.step_time_ms.median,
        "memory": float(found.peak_device_bytes or 0),
        "energy": -(found.tokens_per_j or 0.0),
        "largest": -float(found.settings.parameter_count or 0),
    }[goal]


def is_measured(goal: str, found: Row) -> bool:
    if goal == "energy":
        return found.tokens_per_j is not None
    return goal != "memory" or bool(found.peak_device_bytes)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_the_advised_row_of_committed_results_is_the_measured_best(path: Path, goal: str) -> None:
    """Among rows that took turns, ratios within rounds decide, and medians differ by the drift of the machine."""
    results = read_results(path)
    for advice in advice_on(results, GOALS[goal]):
        best = advice.ranking[0][1]
        groups = [results.rows] if goal == "largest" else by_workload(results.rows)
        (rows,) = [group for group in groups if any(found is best for found in group)]
        measured = [figure(goal, found) for found in rows if is_ranked(found) and is_measured(goal, found)]
        assert len(measured) == len(advice.ranking)
        drift = 1.05 if best.turns is not None and goal in ("throughput", "step-time") else 1.0
        assert figure(goal, best) <= max(min(measured) * drift, min(measured))


def grid() -> Results:
    return results_of(
        row("zero1", 100.0, 800, tokens_per_j=10.0),
        row("zero3", 130.0, 500, tokens_per_j=8.0),
        row("zero1", 180.0, 1200, batch_size=16, tokens_per_j=12.0),
        row("zero3", 400.0, 300, offload="cpu_optimizer"),
    )


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        ("throughput", ("zero1", 16, "none")),
        ("step-time", ("zero1", 8, "none")),
        ("memory", ("zero3", 8, "cpu_optimizer")),
        ("largest", ("zero1", 16, "none")),
        ("energy", ("zero1", 16, "none")),
    ],
)
def test_each_goal_has_its_own_best_row(goal: str, expected: tuple[str, int, str]) -> None:
    best = advised_row(grid().rows, GOALS[goal])
    assert best is not None
    assert (best.strategy, best.settings.batch_size, best.settings.offload) == expected


def test_largest_ranks_models_of_all_workloads_together() -> None:
    results = results_of(row("zero1", 10.0, 100), row("zero3", 90.0, 900, model="big", parameter_count=10**9))
    (advice,) = advice_on(results, GOALS["largest"])
    assert advice.ranking[0][1].settings.model == "big"
    assert advice.verdict.startswith("Take zero3 for the largest model that fits")


def test_rows_above_the_limit_are_neither_ranked_nor_the_measure_of_others() -> None:
    (advice,) = advice_on(grid(), memory_limit_bytes=600 << 20)
    assert [label for label, _ in advice.ranking] == [
        "zero3, batch 8, offload none",
        "zero3, batch 8, offload cpu_optimizer",
    ]
    assert advice.ranking[0][1].relative == 1.0
    assert advice.left_out[0] == (
        "zero1, batch 8, offload none (oom: its peak of 800.0 MiB is above --memory-limit)"
    )


def test_the_limit_leaves_the_results_as_they_are() -> None:
    results = grid()
    before = results.model_dump_json()
    advice_on(results, memory_limit_bytes=GIB // 2)
    assert results.model_dump_json() == before


def test_memory_that_the_limit_takes_is_not_to_spare() -> None:
    results = results_of(row("zero1", 100.0, 800), row("zero3", 140.0, 400))
    assert any(one.rule == "memory-to-spare" for one in advice_on(results)[0].findings)
    (advice,) = advice_on(results, memory_limit_bytes=900 << 20)
    assert not any(one.rule == "memory-to-spare" for one in advice.findings)


def test_the_verdict_names_rows_that_are_as_fast() -> None:
    (advice,) = advice_on(results_of(row("zero1", 100.0, 800), row("zero3", 100.2, 400)))
    assert advice.verdict == "Take zero1 for the most tokens a second: 20,480 tokens/s. zero3 ties with it."


def test_export_takes_the_advised_row(tmp_path: Path) -> None:
    results = grid()
    (tmp_path / "results.json").write_text(results.model_dump_json(), encoding="utf-8")
    _, exported = chosen_row(str(tmp_path))
    (advice,) = advice_on(results)
    assert exported.name == advice.ranking[0][1].name


def test_the_command_prints_verdict_ranking_and_cures(tmp_path: Path) -> None:
    lines = run(tmp_path, grid()).splitlines()
    assert lines[0].startswith("Take zero1, batch 16, offload none for the most tokens a second: ")
    assert lines[2].startswith("1. zero1, batch 16, offload none: ")
    assert any(line.startswith("  what helps: ") for line in lines)


def test_the_bottleneck_is_that_of_the_goals_row(tmp_path: Path) -> None:
    waits = phases(exposed_communication=60.0)
    results = results_of(
        row("zero1", 100.0, 800, phases_ms=phases()), row("zero3", 210.0, 400, phases_ms=waits)
    )
    assert "The network is the bottleneck of zero3" in run(tmp_path, results, "--goal", "memory")
    assert "Compute is the bottleneck of zero1" in run(tmp_path, results)


def test_json_has_the_verdict_first(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, mixed(), "--json", "--goal", "memory"))
    assert next(iter(found)) == "verdict" and found["goal"] == "memory"
    (workload,) = found["workloads"]
    assert workload["ranking"][0]["peak_device_bytes"] == min(
        each["peak_device_bytes"] for each in workload["ranking"]
    )
    assert {"rule", "text", "cure"} == set(workload["findings"][0])


def test_results_without_energy_have_no_row_for_it(tmp_path: Path) -> None:
    assert run(tmp_path, results_of(row("zero1", 100.0, 800)), "--goal", "energy").startswith(
        "Nothing to recommend: no row that is correct both fits and has a figure for the most tokens a joule."
    )
    assert "Take " in run(tmp_path, gpus(), "--goal", "energy")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--goal", "speed"], "use one of throughput, step-time"), (["--memory-limit", "0"], "must be above 0")],
)
def test_what_the_options_do_not_allow_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(cli.app, ["advise", str(SAMPLE), *arguments], catch_exceptions=False)


HOSTILE = "mine:[red]A[/red]{best}<script>alert(1)</script>[/]"


def hostile() -> Results:
    rows: list[Any] = [row(HOSTILE, 100.0, 800), row("zero3", 130.0, 400)]
    return results_of(*rows)


def test_markup_in_names_is_printed_as_it_is(tmp_path: Path) -> None:
    assert f"{HOSTILE} is the fastest of 2 correct rows" in run(tmp_path, hostile())


def test_markup_in_names_is_escaped_on_the_page() -> None:
    page = page_text([("hostile", hostile())])
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
