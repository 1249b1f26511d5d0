"""Judgement of reports of ranks: their losses and deviations, checksums and dtypes of rows, verdicts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zerobench.bench import assess
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.protocol.job import Report, TensorDeviation, Verification
from zerobench.bench.protocol.tolerances import describe, exceeded, tolerances
from zerobench.bench.rank import verify
from zerobench.bench.rank.evidence import Evidence
from zerobench.errors import Error
from zerobench.results.schema import Deviation, Results, Row, RowDtypes, Settings


def reports(loss: float, *, deviation: TensorDeviation, norm: float = 1.0) -> list[Report]:
    dtypes = RowDtypes(
        param="float32", compute="float32", reduce="float32", master="float32", state="float32"
    )
    first = Verification(loss=loss - 0.5, norm=norm, checksum="c", deviation=deviation)
    return [
        Report(dtypes=dtypes, verification=first),
        Report(dtypes=dtypes, verification=Verification(loss=loss + 0.5, norm=norm)),
    ]


FINE = TensorDeviation(
    gradient=0,
    gradient_worst="",
    update=0,
    piece=0,
    piece_worst="",
    optimizer=0,
    optimizer_worst="",
    max_abs=0,
)


def test_the_loss_is_the_mean_over_ranks() -> None:
    (row,) = make_plan(CompareOptions(data="synthetic", strategies=("ddp",))).configurations
    known = assess.ReferenceRun(model=row.model, file="f", loss=5.0, norm=1.0)
    assert not exceeded(assess.assess(reports(5.0, deviation=FINE), row, known))
    found = assess.assess(reports(5.1, deviation=FINE, norm=1.1), row, known)
    assert exceeded(found) == ["loss", "norm"]
    assert (found.loss, found.norm) == pytest.approx((0.02, 0.1)) and found.reference == "single"
    assert found.verdict is not None and "loss deviates by 0.02" in found.verdict
    without = reports(5.0, deviation=FINE)  # of a peer that does not say, or of a reference that did not
    assert without[0].verification is not None
    without[0].verification.norm = None
    found = assess.assess(without, row, known)
    assert found.norm is None and not exceeded(found)
    unknown = replace(known, norm=None)
    assert assess.assess(reports(5.0, deviation=FINE), row, unknown).norm is None


def test_a_row_without_a_reference_is_one_and_votes_with_its_group() -> None:
    (row,) = make_plan(CompareOptions(data="synthetic", strategies=("zero1",))).configurations
    alone = assess.assess(reports(5.0, deviation=FINE), row, None)
    assert alone == Deviation(checksum_group=row.checksum_group(), verdict="is the reference")
    assert row.checksum_group() and not exceeded(alone)


def test_a_verified_row_votes_with_its_group_and_has_the_limits_of_its_dtypes() -> None:
    (row,) = make_plan(CompareOptions(data="synthetic", strategies=("zero1",))).configurations
    known = assess.ReferenceRun(model=row.model, file="f", loss=5.0, norm=1.0)
    plain = assess.assess(reports(5.0, deviation=FINE), row, known)
    assert plain.checksum_group == row.checksum_group() and row.checksum_group()
    assert plain.tolerance == tolerances("fp32")
    assert plain.verdict == "as single on the same global batches, step 1 and 4 steps"
    row.settings.dropout = 0.1
    dropped = assess.assess(reports(5.0, deviation=FINE), row, known)
    assert dropped.verdict == f"{plain.verdict} without dropout"
    row.settings.dropout = 0.0
    low = reports(5.0, deviation=FINE)
    for report in low:
        report.dtypes.reduce = "bfloat16"
        assert report.verification is not None
        report.verification.loss_dtype = "bfloat16"
    reference = replace(known, loss_dtype="float32")
    assert assess.assess(low, row, reference).tolerance == tolerances("bf16", loss_dtype="bfloat16")
    both = replace(known, loss_dtype="bfloat16")
    expected = tolerances("bf16", loss_dtype="bfloat16", reference_loss_dtype="bfloat16")
    assert assess.assess(low, row, both).tolerance == expected != tolerances("bf16", loss_dtype="bfloat16")


def evaluated(
    reports_: list[Report], *, losses: list[float | None], reads: list[float | None]
) -> list[Report]:
    for report, loss, share in zip(reports_, losses, reads, strict=True):
        assert report.verification is not None
        report.verification.evaluation = loss
        report.verification.reads, report.verification.reads_worst = share, "h.0.ln_1.weight"
    return reports_


def test_the_worst_rank_decides_what_is_read_and_evaluated() -> None:
    (row,) = make_plan(CompareOptions(data="synthetic", strategies=("ddp",))).configurations
    known = assess.ReferenceRun(model=row.model, file="f", loss=5.0, norm=1.0)

    def found(losses: list[float | None], reads: list[float | None]) -> Deviation:
        evaluated_reports = evaluated(reports(5.0, deviation=FINE), losses=losses, reads=reads)
        if None not in losses:
            assert evaluated_reports[0].verification is not None
            evaluated_reports[0].verification.expected_evaluations = [4.0, 6.0]
        return assess.assess(evaluated_reports, row, known)

    fine = found([4.0, 6.0], [0.0, 0.0])
    assert (fine.evaluation, fine.reads, fine.reads_worst) == (0.0, 0.0, None)
    assert not exceeded(fine)
    swapped = found([6.0, 4.0], [0.0, 0.0])  # each rank has a batch of its own
    assert swapped.evaluation == pytest.approx(0.5) and exceeded(swapped) == ["evaluation"]
    broken = found([4.0, math.nan], [0.0, 0.0])
    assert exceeded(broken) == ["evaluation"]
    old = found([4.0, 6.0], [0.0, 1e-6])
    assert exceeded(old) == ["reads"]
    assert "0.0001 % of what forward reads of h.0.ln_1.weight on rank 1 is not" in describe(old, "reads")
    first = found([4.0, 9.0], [1e-6, 0.0])
    assert first.reads_worst == "h.0.ln_1.weight on rank 0" and first.evaluation == pytest.approx(0.5)
    half = evaluated(reports(5.0, deviation=FINE), losses=[4.0, None], reads=[None, None])
    assert half[0].verification is not None
    half[0].verification.expected_evaluations = [4.0, 6.0]
    assert assess.assess(half, row, known).evaluation is None
    unknown = found([None, None], [None, None])  # a peer that does not evaluate
    assert (unknown.evaluation, unknown.reads) == (None, None) and not exceeded(unknown)


def test_fewer_layers_are_said() -> None:
    (row,) = make_plan(CompareOptions(data="synthetic", strategies=("ddp",))).configurations
    known = assess.ReferenceRun(model={**row.model, "num_layers": 2}, file="f", loss=5.0, norm=1.0)
    deviation = assess.assess(reports(5.0, deviation=FINE), row, known)
    assert deviation.verdict is not None and "2 of 4 layers" in deviation.verdict
    assert deviation.verified_layers == 2
    all_layers = assess.ReferenceRun(model=row.model, file="f", loss=5.0, norm=1.0)
    assert assess.assess(reports(5.0, deviation=FINE), row, all_layers).verified_layers is None


def test_more_experts_are_said() -> None:
    (row,) = make_plan(CompareOptions(data="synthetic", strategies=("ddp",))).configurations
    known = assess.ReferenceRun(model={**row.model, "experts_per_token": 8}, file="f", loss=5.0, norm=1.0)
    deviation = assess.assess(reports(5.0, deviation=FINE), row, known)
    assert deviation.verdict is not None and "with all 8 experts for every token" in deviation.verdict
    assert deviation.verified_experts_per_token == 8


def row(strategy: str, checksum: str, *, dtype: str = "float32", world_size: int = 2) -> Row:
    settings = Settings(
        model="tiny", world_size=world_size, precision="fp32", batch_size=1, seq_length=8, grad_accum=1
    )
    dtypes = RowDtypes(param=dtype, compute=dtype, reduce=dtype, master="float32", state="float32")
    deviation = Deviation(checksum_group="g")
    return Row(
        name=strategy, strategy=strategy, status="ok", settings=settings, dtypes=dtypes, checksum=checksum,
        deviation=deviation, tokens_per_s=1.0,
    )  # fmt: skip


def settled(*rows: Row) -> list[str]:
    assess.settle(Results(created="", machine={}, versions={}, command="", rows=list(rows)))
    return [row.status for row in rows]


def test_a_minority_checksum_is_wrong_and_loses_its_figures() -> None:
    odd = row("zero2", "y")
    assert settled(row("zero0", "x"), row("zero1", "x"), odd, row("zero3", "x")) == [
        "ok",
        "ok",
        "wrong",
        "ok",
    ]
    assert odd.tokens_per_s is None
    assert odd.error is not None and "zero0" in odd.error


def test_without_a_majority_nobody_is_right() -> None:
    assert settled(row("zero0", "x"), row("zero3", "y")) == ["wrong", "wrong"]
    assert settled(row("zero0", "x"), row("zero3", "x")) == ["ok", "ok"]


def test_a_row_that_failed_after_its_verification_still_votes() -> None:
    failed = row("zero1", "x")
    failed.status, failed.error = "failed", "repeat 2: no"
    assert settled(row("zero0", "x"), failed, row("zero2", "y")) == ["ok", "failed", "wrong"]
    assert failed.error == "repeat 2: no"


def test_a_row_that_is_wrong_by_itself_has_no_vote() -> None:
    wrong = row("zero1", "y")
    wrong.status = "wrong"
    assert settled(row("zero0", "x"), wrong) == ["ok", "wrong"]


def test_no_figure_is_left_of_a_wrong_row() -> None:
    kept = {
        "name", "strategy", "stage", "status", "error", "oom_tier", "settings", "dtypes", "comparable", "checksum",
        "deviation", "binding", "update_cpus", "search", "started", "duration_s", "log", "rerun", "network_how",
    }  # fmt: skip
    odd = row("zero2", "y")
    for name in Row.model_fields.keys() - kept:
        setattr(odd, name, 1.0)
    settled(row("zero0", "x"), row("zero1", "x"), odd)
    assert odd.status == "wrong"
    assert {name for name in Row.model_fields.keys() - kept if getattr(odd, name) is not None} == set()


def test_the_floor_and_rows_of_other_precisions_judge_no_dtypes() -> None:
    rows = [row("ddp", "x"), *(row("compute_only", "x", dtype="bfloat16") for _ in range(2))]
    low = [row("zero1", "x", dtype="bfloat16") for _ in range(2)]
    for one in low:
        one.settings.precision = "bf16"
    settled(*rows, *low)
    assert all(one.comparable for one in (*rows, *low))


def test_other_dtypes_are_not_compared_as_equals() -> None:
    rows = [
        row("zero0", "x"),
        row("zero3", "x"),
        row("ddp", "x", dtype="bfloat16"),
        row("single", "x", world_size=1),
    ]
    assert rows[3].dtypes is not None
    rows[3].dtypes.reduce = "float64"  # one rank reduces nothing
    settled(*rows)
    assert [row.comparable for row in rows] == [True, True, False, True]
    rows[3].dtypes.state = "bfloat16"
    settled(*rows)
    assert not rows[3].comparable


def test_the_dtypes_of_ours_count_however_many_peers_have_others() -> None:
    rows = [row("zero3", "x"), row("fsdp1", "x", dtype="bfloat16"), row("fsdp2", "x", dtype="bfloat16")]
    settled(*rows)
    assert [row.comparable for row in rows] == [True, False, False]
    peers = rows[1:]
    settled(*peers)
    assert [row.comparable for row in peers] == [True, True]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_of_as_many_rows_of_ours_the_usual_reduction_counts_whatever_the_order(order) -> None:
    rows = [row(name, "x", dtype="bfloat16") for name in ("zero1", "zero2", "fsdp2", "ddp_master")]
    assert rows[0].dtypes is not None
    rows[0].dtypes.reduce = "float32"
    settled(*(rows[index] for index in order))
    assert [row.comparable for row in rows] == [False, True, True, True]


def test_a_reference_that_finds_no_room_names_the_cures() -> None:
    tensors = {"w": torch.zeros(1 << 20)}
    found = Evidence(
        loss=1.0, norm=1.0, gradients=tensors, parameters=tensors, moments=tensors, moment_samples=[],
    )  # fmt: skip
    with pytest.raises(Error, match=r"of 16 MiB could not be written to /dev: .*ulimit -f.*TMPDIR"):
        verify.write_reference(Path("/dev/full"), found, tensors)
