"""The page on choosing a stage and a tier, and the ladder that it is made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerobench.report.advice.choosing import choosing_page
from zerobench.report.advice.ladder import LADDER, first_rung
from zerobench.report.advice.rules import RULES
from zerobench.strategies.catalogue import CATALOGUE, OFFLOADS, ours_at

PAGE = Path(__file__).parents[2] / "docs/explain/choosing.md"
GB = 10**9


def test_the_page_is_what_the_tables_make() -> None:
    made = choosing_page()
    assert PAGE.read_text(encoding="utf-8") == made, (
        "run `python -m zerobench.report.advice.choosing > docs/explain/choosing.md`"
    )
    assert all(f"**{rule.id}**" in made for rule in RULES)


def test_rungs_are_rows_that_a_comparison_can_run() -> None:
    for rung in LADDER:
        row = CATALOGUE[ours_at(rung.stage)]
        assert rung.offload in OFFLOADS
        assert not rung.offload.startswith("nvme") or rung.offload in row.nvme_offloads


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_rung_of_a_tier_needs_less_of_the_device(ranks: int) -> None:
    needs = [rung.device_bytes(GB, ranks) for rung in LADDER if rung.offload == "none"]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 4


def test_published_needs_of_7_billion_parameters_on_four_gpus() -> None:
    """16 bytes a parameter, of which a stage divides 0, 12, 14 or 16 among the ranks."""
    needs = [rung.device_bytes(7 * GB, 4) / GB for rung in LADDER[:4]]
    assert needs == pytest.approx([112, 49, 38.5, 28])


@pytest.mark.parametrize(
    ("billions", "ranks", "expected"),
    [
        (0.124, 1, "zero0"),
        (7, 1, "zero2, cpu_optimizer"),
        (7, 8, "zero1"),
        (13, 8, "zero3"),
        (70, 8, "zero3, nvme"),
    ],
)
def test_the_first_rung_that_fits_comfortably(billions: float, ranks: int, expected: str) -> None:
    rung = first_rung(round(billions * GB), ranks, device_bytes=80 * GB, host_bytes=1024 * GB)
    assert rung is not None and rung.name == expected
