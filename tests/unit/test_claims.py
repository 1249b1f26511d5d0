"""benchmarks/claims.py: which rows a claim is judged by, and that the page is what the committed results give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import claim_rows
import claims
import pytest
from advice_samples import results_of, row
from claim_rows import Measured

from zerobench.recipes.references import read_references

ROW = Measured(
    source="a.md",
    group=1,
    family="zero",
    stage=1,
    offload="none",
    ranks=2,
    on_gpu=True,
    ms=100.0,
    peak_bytes=10e9,
)
STAGE_2 = next(claim for claim in claims.CLAIMS if claim.text.startswith("Stage 2 is {low}"))


def judged(ms: float, **given: object) -> claims.Judgement:
    rows = [ROW, replace(ROW, stage=2, ms=ms, **given)]  # type: ignore[arg-type]
    return claims.judge(STAGE_2, rows, read_references())


def test_the_page_is_what_the_results_give() -> None:
    made = claims.claims_page(claim_rows.measured_rows())
    assert claims.PAGE.read_text(encoding="utf-8") == made, "run `python benchmarks/claims.py`"


@pytest.mark.parametrize(
    ("ms", "verdict"), [(100.0, "contradicted"), (112.0, "confirmed"), (120.0, "contradicted")]
)
def test_a_claim_holds_within_its_published_bounds(ms: float, verdict: str) -> None:
    found = judged(ms)
    assert found.text == "Stage 2 is 10 to 15 % slower than stage 1"
    assert found.verdict == verdict


@pytest.mark.parametrize(
    "given", [{"on_gpu": False}, {"group": 2}, {"family": "deepspeed"}, {"offload": "nvme"}, {"ranks": 1}]
)
def test_rows_that_differ_in_more_test_nothing(given: dict[str, object]) -> None:
    assert judged(112.0, **given).verdict == "not tested here"


def test_every_claim_is_a_published_one() -> None:
    """Its bounds are looked up by their names, and its share of memory is the published one."""
    references = read_references()
    for claim in claims.CLAIMS:
        claim.bounds(references)
        assert any(one.id == claim.reference for one in references)
    (share,) = [one.value for one in references if one.id == "rule-zero0-1"]
    assert any(f"up to {share:g} %" in claim.text for claim in claims.CLAIMS)


def test_a_page_of_tables_gives_rows(tmp_path: Path) -> None:
    path = tmp_path / "gpu_h100x4.md"
    path.write_text(
        "| row | step ms ± MAD | peak GiB |\n| --- | --- | --- |\n"
        "| zero0 / zero1 | 20.0 / 21.0 | 4.0 / 3.0 |\n| zero2 | 22.0 ± 0.1 | 2.5 |\n"
        "| ddp | 23.0 | 4.0 |\n| zero3 | failed | |\n\n"
        "| mode | step ms |\n| --- | --- |\n| zero3 | 30, 34, 32 |\n",
        encoding="utf-8",
    )
    found = [(one.name, one.ms, one.peak_bytes) for one in claim_rows.page_rows(path, tmp_path)]
    gib = float(1 << 30)
    assert found == [
        ("zero0", 20.0, 4 * gib),
        ("zero1", 21.0, 3 * gib),
        ("zero2", 22.0, 2.5 * gib),
        ("zero3", 32.0, None),
    ]
    assert {one.ranks for one in claim_rows.page_rows(path, tmp_path)} == {4}


def test_a_result_file_gives_its_ranked_rows(tmp_path: Path) -> None:
    results = results_of(
        row("zero1", 100.0, 800),
        row("zero3", 120.0, 400),
        row("ddp", 90.0, 900),
        row("zero2", 1.0, 1, status="wrong"),
    )
    (tmp_path / "results.json").write_text(results.model_dump_json(), encoding="utf-8")
    found = list(claim_rows.file_rows(tmp_path / "results.json", tmp_path))
    assert [(one.name, one.ms, one.on_gpu) for one in found] == [
        ("zero1", 100.0, False),
        ("zero3", 120.0, False),
    ]
    assert found[0].group == found[1].group
