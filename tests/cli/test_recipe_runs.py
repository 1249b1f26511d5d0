"""Recipes from beginning to end: rows that are ok, sentences, and charts."""

from __future__ import annotations

import json

import pytest
from conftest import Command

from zerobench.recipes import recipe as recipes

NEED_A_GPU = {"mfu.pct"}


def run_quick(command: Command, name: str) -> None:
    recipe = recipes.find(name)
    references = ["--references"] if recipe.studies else []
    result = command.run("recipe", "run", name, "--quick", *references, "--output-dir", "out", timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    out = command.folder / "out"
    rows = json.loads((out / "results.json").read_text())["rows"]
    # Peers run over slow networks where links can be shaped.
    skipped = ("ddp keeps all of its state", "needs shaped links")
    ran = [row for row in rows if row["status"] != "skipped"]
    assert {row["status"] for row in ran} == {"ok"}
    assert all(row["tokens_per_s"] > 0 and row["peak_device_bytes"] > 0 for row in ran)
    assert all(row["compile_s"] > 0 for row in ran if row["settings"]["compile"] != "none")
    assert all(any(why in row["error"] for why in skipped) for row in rows if row not in ran)
    question, empty, *sentences = (out / "conclusions.txt").read_text().splitlines()
    assert (question, empty) == (recipe.question, "") and sentences
    assert all(sentence in result.stdout for sentence in sentences)
    drawn = [path.name for path in (out / "charts").iterdir() if path.stat().st_size > 1000]
    for chart in recipe.charts:
        assert chart.metric in NEED_A_GPU or any(each.startswith(chart.metric) for each in drawn)
    assert (out / "references.csv").is_file() == bool(references)
    assert f"results in {out.name}" in result.stdout
    assert command.leaves_nothing()


def test_a_recipe_runs_and_concludes(command) -> None:
    run_quick(command, "accumulation")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "accumulation"])
def test_every_recipe_runs_and_concludes(command, name: str) -> None:
    run_quick(command, name)
