"""Comparisons of models that no name ships: folders of transformers' architectures, and a function of one's own."""

from __future__ import annotations

import json

import folders
import pytest

SMALL = [
    "--batch-size",
    "8",
    "--seq-length",
    "16",
    "--num-steps",
    "2",
    "--warmup-steps",
    "1",
    "--rounds",
    "0",
]


def by_model(command) -> dict[tuple[str, str], dict]:
    results = json.loads((command.folder / "out" / "results.json").read_text())
    return {(row["settings"]["model"].rpartition("/")[2], row["strategy"]): row for row in results["rows"]}


def statuses(rows) -> dict[tuple[str, str], tuple[str, str | None]]:
    return {key: (row["status"], row["error"]) for key, row in rows.items()}


def test_a_folder_of_images_and_a_module_of_ones_own_are_ok(command) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    names = [str(folders.write(command.folder, "vit")), "own_models:regression"]
    ways = ["single", "zero3", "ddp"]
    result = command.run(
        "compare", *SMALL, "--model", ",".join(names), "--strategies", *ways, "--output-dir", "out"
    )
    assert result.returncode == 0, result.stderr
    rows = by_model(command)
    keys = [(name, way) for name in ("vit", "own_models:regression") for way in ways]
    assert statuses(rows) == dict.fromkeys(keys, ("ok", None))
    for key, row in rows.items():
        assert row["mfu"] is None and row["settings"]["parameter_count"] > 0
        assert (row["deviation"]["update"] is None) == (key[1] == "single")
    own = rows["own_models:regression", "zero3"]
    assert own["name"] == "zs3_fp32_ranks2_bs8_sl16_own_models-regression"
    assert own["deviation"]["evaluation"] is None  # its batch norm evaluates with each rank's own statistics
    assert "--model own_models:regression" in own["rerun"]
    assert command.leaves_nothing()


def test_a_model_that_cannot_run_is_refused_before_anything_starts(command) -> None:
    folder = folders.write(command.folder, "qwen3", architectures=["Qwen3Model"])
    result = command.run("compare", *SMALL, "--model", str(folder), "--output-dir", "out", timeout_s=60)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "computes no loss" in result.stderr
    assert not (command.folder / "out").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_architecture_is_ok(command) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    names = [str(folders.write(command.folder, kind)) for kind in folders.ARCHITECTURES]
    names += ["own_models:regression", "own_models:language"]
    ways = ["single", "zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2"]
    result = command.run(
        "compare", *SMALL, "--model", ",".join(names), "--strategies", *ways, "--output-dir", "out", timeout_s=1700
    )  # fmt: skip
    rows = by_model(command)
    keys = [(name.rpartition("/")[2], way) for name in names for way in ways]
    assert statuses(rows) == dict.fromkeys(keys, ("ok", None))
    assert result.returncode == 0, result.stderr
