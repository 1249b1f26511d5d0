"""Advice on rows of a GPU: the bottleneck that its profile shows, and the energy that its driver counts."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from comparisons import SMALL, compare

from zerobench.report.advice.advise import advice_on
from zerobench.report.advice.bottleneck import bottleneck, resource_shares
from zerobench.report.advice.goals import GOALS
from zerobench.results.files import read_results
from zerobench.results.schema import Results

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("advice")
    compare(
        folder, *SMALL, "--world-size", "1", "--strategies", "zero2", "--offload", "none,cpu_optimizer",
        "--num-steps", "50",
    )  # fmt: skip
    return read_results(folder / "out")


def test_the_profile_of_each_row_names_a_bottleneck(results: Results) -> None:
    for row in results.rows:
        assert sum(resource_shares(row).values()) == pytest.approx(1.0)
        assert bottleneck(row) is not None


def test_advice_names_the_bottleneck_of_the_advised_row(results: Results) -> None:
    (advice,) = advice_on(results)
    rules = {finding.rule for finding in advice.findings}
    assert any(rule.startswith("bound-by-") or rule == "power-cap" for rule in rules)


def test_the_row_with_most_tokens_a_joule_is_advised_for_energy(results: Results) -> None:
    known = [row for row in results.rows if row.tokens_per_j is not None]
    if not known:
        pytest.skip("the driver of this GPU counts no energy")
    (advice,) = advice_on(results, GOALS["energy"])
    assert advice.ranking[0][1].tokens_per_j == max(row.tokens_per_j or 0.0 for row in known)
