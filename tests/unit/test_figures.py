"""Which figures of a run a row shows: none of a run that is wrong, not finite or not what the row is called."""

from __future__ import annotations

import math

import pytest
from builders import make_window
from comparison_samples import BF16, TWO_GPUS, verified
from plan_samples import configuration

from zerobench.bench.assess import ReferenceRun, apply_outcome, first_row
from zerobench.bench.launch.outcome import Outcome
from zerobench.bench.protocol.job import Report, Verification

ZERO1 = configuration(**TWO_GPUS, strategies=("zero1",))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"losses": [2.0, math.nan]}, "the loss of measured step 2 is not finite"),
        ({"validation_loss": math.inf}, "the held-out loss after the measured steps is not finite"),
        ({"compiled_graphs": 0.0}, "compiled nothing of it"),
        ({"applied_steps": 0, "skipped_steps": 3}, "skipped the updates of 3 of the last 3 steps"),
        # Of two measured steps and the one before: perhaps that one alone was applied, or one of the two.
        ({"applied_steps": 1, "skipped_steps": 2}, "skipped the updates of 2 of the last 3 steps"),
        ({"applied_steps": 2, "skipped_steps": 1}, "skipped the updates of 1 of the last 3 steps"),
    ],
)
def test_figures_that_are_none_of_the_rows_are_not_shown(figures, said) -> None:
    row = first_row(ZERO1, status="failed")
    windows = [make_window([10.0, 10.0]), make_window([10.0, 10.0], **figures)]
    reports = {rank: Report(dtypes=BF16, window=window) for rank, window in enumerate(windows)}
    if not figures.keys() & {"losses", "validation_loss"}:  # all ranks show the same
        reports[0] = reports[1]
    assert apply_outcome(row, Outcome(status="ok", reports=reports), ZERO1, None) == []
    assert row.status == "failed" and said in (row.error or "") and row.step_time_ms is None


def test_a_row_that_skips_the_updates_of_few_steps_is_shown_and_says_how_many() -> None:
    row = first_row(ZERO1, status="failed")
    shown = make_window([10.0] * 3, [1.0] * 3, applied_steps=3, skipped_steps=1)
    reports = {rank: Report(dtypes=BF16, window=shown) for rank in range(2)}
    assert apply_outcome(row, Outcome(status="ok", reports=reports), ZERO1, None) == [shown, shown]
    assert (row.status, row.error, row.skipped_steps) == ("ok", None, 1)


@pytest.mark.parametrize("quantity", ["gradient", "update", "piece", "optimizer"])
def test_a_row_that_is_measured_and_wrong_has_no_figures(quantity) -> None:
    verifications = [verified(**{quantity: 1.0}), Verification(loss=5.0, norm=1.0)]
    reports = {
        rank: Report(dtypes=BF16, verification=verification, window=make_window())
        for rank, verification in enumerate(verifications)
    }
    row = first_row(ZERO1, status="failed")
    reference = ReferenceRun(model=ZERO1.model, file="f", loss=5.0, norm=1.0)
    assert apply_outcome(row, Outcome(status="ok", reports=reports), ZERO1, reference) == []
    place = "" if quantity == "update" else " of wte.weight"
    assert row.status == "wrong" and f"{quantity}{place} deviates by 1 " in (row.error or "")
    assert row.step_time_ms is row.tokens_per_s is row.peak_device_bytes is row.loss is None
    told = "run with --lr 0.0001 to tell it from a fault" in (row.error or "")
    assert told == (quantity in ("update", "piece"))  # a gradient of step 1 does not depend on the rate


def test_energy_that_one_rank_does_not_know_is_null() -> None:
    for unknown in (None, 0.0):
        row = first_row(ZERO1, status="failed")
        energies = (5.0, None) if unknown is None else (unknown, unknown)
        reports = {
            rank: Report(dtypes=BF16, window=make_window(energy_per_step_j=energy_j))
            for rank, energy_j in enumerate(energies)
        }
        apply_outcome(row, Outcome(status="ok", reports=reports), ZERO1, None)
        assert row.status == "ok" and row.energy_per_step_j is None and row.tokens_per_j is None


def test_memory_that_ran_out_says_whose() -> None:
    row = first_row(ZERO1, status="failed")
    outcome = Outcome(status="oom", error="rank 0: OutOfMemoryError: no", oom_tier="device")
    assert apply_outcome(row, outcome, ZERO1, None) == []
    assert (row.status, row.oom_tier) == ("oom", "device")
