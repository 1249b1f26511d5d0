"""Pipelines on two GPUs: right against the reference, and as idle as the formula says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("a pipeline needs two GPUs", allow_module_level=True)

from comparisons import compare

pytestmark = pytest.mark.timeout(600)
# Stages of the same work, some ten milliseconds each, with a head that is nothing beside them.
LARGE = (
    "--model", "tiny", "--num-layers", "8", "--hidden-size", "2048", "--model-option", "num_heads=16",
    "--model-option", "max_seq_length=1024", "--seq-length", "1024", "--batch-size", "8", "--grad-accum", "2",
    "--precision", "bf16", "--num-steps", "10", "--warmup-steps", "10", "--verify-layers", "4",
)  # fmt: skip
MOST_POINTS = 3.0


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Two stages and four micro-batches of each schedule."""
    folder = tmp_path_factory.mktemp("pipelines")
    _, results = compare(
        folder, *LARGE, "--world-size", "2", "--strategies", "pipeline",
        "--pipeline-schedule", "gpipe,1f1b,interleaved", timeout_s=550,
    )  # fmt: skip
    return {row["settings"]["pipeline_schedule"]: row for row in results["rows"]}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_pipeline_on_gpus_is_ok(rows, schedule):
    assert rows[schedule]["status"] == "ok", rows[schedule]["error"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_within_three_points_of_the_formula(rows, schedule):
    row = rows[schedule]
    assert (row["settings"]["pipeline_stages"], row["settings"]["micro_batches"]) == (2, 4)
    assert row["bubble_formula_pct"] == pytest.approx(20)
    assert abs(row["bubble_pct"] - row["bubble_formula_pct"]) <= MOST_POINTS, row["phases_ms"]


def test_interleaving_is_less_idle_than_the_plain_schedule(rows):
    assert rows["interleaved"]["bubble_pct"] < rows["1f1b"]["bubble_pct"]
