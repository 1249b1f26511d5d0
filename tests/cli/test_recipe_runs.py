"""Recipes from beginning to end: rows that are ok, sentences, and charts."""

from __future__ import annotations

import json

import pytest
from conftest import Command

from zerobench.recipes import recipe as recipes


def run_quick(command: Command, name: str) -> None:
    result = command.run("recipe", "run", name, "--quick", "--output-dir", "out", timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    out = command.folder / "out"
    every = json.loads((out / "results.json").read_text())["rows"]
    # Peers run over slow networks where links can be shaped.
    rows = [row for row in every if "needs shaped links" not in (row["error"] or "")]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["tokens_per_s"] > 0 and row["peak_device_bytes"] > 0 for row in rows)
    question, empty, *sentences = (out / "conclusions.txt").read_text().splitlines()
    assert (question, empty) == (recipes.find(name).question, "") and sentences
    assert all(sentence in result.stdout for sentence in sentences)
    assert f"results in {out.name}" in result.stdout
    assert command.leaves_nothing()


def test_a_recipe_runs_and_concludes(command) -> None:
    run_quick(command, "accumulation")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "accumulation"])
def test_every_recipe_runs_and_concludes(command, name: str) -> None:
    run_quick(command, name)
