"""The arithmetic of verification: planted deviations, floors, checksums and verdicts."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from zerobench.bench import assess, verify
from zerobench.bench.job import Report, TensorDeviation, Verification
from zerobench.bench.options import CompareOptions
from zerobench.bench.plan import make_plan
from zerobench.bench.result import Deviation, Results, Row, RowDtypes, Settings
from zerobench.bench.tolerances import TOLERANCES, describe, exceeded, tolerance_precision, tolerances
from zerobench.errors import Error, VerificationError
from zerobench.strategies.base import OptimizerSettings, StrategySettings

LR = 1e-3
compare = functools.partial(verify.compare, optimizer=OptimizerSettings(lr=LR))


def reference() -> verify.Reference:
    """Two parameters after some steps of about one learning rate each."""
    generator = torch.Generator().manual_seed(0)
    gradients = {
        "a.weight": torch.randn(40, 50, generator=generator),
        "b.bias": torch.randn(70, generator=generator),
    }
    updates = {name: -4 * LR * gradient.sign() for name, gradient in gradients.items()}
    parameters = {
        name: 0.02 * torch.randn(g.shape, generator=generator) + updates[name]
        for name, g in gradients.items()
    }
    return verify.Reference(gradients, updates, parameters, {name: 0.3 * g for name, g in gradients.items()})


def evidence(expected: verify.Reference, **changes) -> verify.Evidence:
    tensors = {
        "gradients": {name: tensor.clone() for name, tensor in expected.gradients.items()},
        "parameters": {name: tensor.clone() for name, tensor in expected.parameters.items()},
        "moments": expected.moments,
        "moment_samples": [],
    }
    return verify.Evidence(loss=5.0, norm=1.0, **{**tensors, **changes})


def test_equal_is_zero() -> None:
    expected = reference()
    found = compare(evidence(expected), expected, precision="fp32")
    assert (found.gradient, found.update, found.piece, found.max_abs) == (0.0, 0.0, 0.0, 0.0)


def test_a_gradient_that_is_not_averaged_shows_in_the_gradient() -> None:
    expected = reference()
    doubled = {name: 2 * gradient for name, gradient in expected.gradients.items()}
    found = compare(evidence(expected, gradients=doubled), expected, precision="bf16")
    assert found.gradient == pytest.approx(1.0)


def test_half_a_gradient_halved_is_found_and_named() -> None:
    expected = reference()
    changed = evidence(expected)
    changed.gradients["b.bias"][:35] *= 0.5
    found = compare(changed, expected, precision="bf16")
    assert found.gradient_worst == "b.bias"
    assert found.gradient > TOLERANCES["bf16"]["gradient"]


def test_a_vanishing_gradient_is_not_held_against_its_own_noise() -> None:
    expected = reference()
    expected.gradients["b.bias"].mul_(1e-9)
    noisy = evidence(expected)
    noisy.gradients["b.bias"].add_(1e-7 * torch.randn(70))
    found = compare(noisy, expected, precision="fp32")
    assert found.gradient < TOLERANCES["fp32"]["gradient"]


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_shard_that_missed_one_update_of_four_is_found(precision) -> None:
    expected = reference()
    stale = evidence(expected)
    # The last third of one parameter: a small part of all, so that the update as a whole hardly shows it.
    stale.parameters["a.weight"].view(-1)[1400:] -= expected.updates["a.weight"].view(-1)[1400:] / 4
    found = compare(stale, expected, precision=precision)
    assert found.piece == pytest.approx(0.25, rel=0.05)
    assert found.piece_worst == "a.weight"
    assert found.piece > 2 * TOLERANCES[precision]["piece"]


def test_steps_of_noise_are_not_a_stale_shard() -> None:
    """Elements whose gradient is rounding noise move by a learning rate in either direction, on every strategy."""
    expected = reference()
    noisy = evidence(expected)
    for name, gradient in expected.gradients.items():
        small = gradient.abs() < 0.05
        noisy.parameters[name][small] += 8 * LR * gradient[small].sign()
    found = compare(noisy, expected, precision="bf16")
    assert found.piece == 0.0
    assert found.update > 0.1


def test_rounding_that_is_as_large_in_quiet_rows_is_no_stale_shard() -> None:
    """The errors of a product's sum do not shrink with a row's gradient, and its updates deviate the more for it."""
    expected = reference()
    noisy = evidence(expected)
    quiet = noisy.parameters["a.weight"].view(-1)[256:512]
    expected.moments["a.weight"].view(-1)[256:512] *= 0.2
    quiet += 0.1 * expected.updates["a.weight"].view(-1)[256:512]
    found = compare(noisy, expected, precision="bf16")
    assert found.piece == 0.0
    expected.moments["a.weight"].mul_(0.2)  # quiet as a whole: nothing in it is quieter than the rest
    noisy.parameters["a.weight"].sub_(0.25 * expected.updates["a.weight"])
    assert compare(noisy, expected, precision="bf16").piece > 2 * TOLERANCES["bf16"]["piece"]


@pytest.mark.parametrize("numel", [0, 1, 256, 257, 256 * 256, 256 * 256 + 1, 1_000_003])
def test_pieces_hold_every_element_once(numel) -> None:
    values = torch.arange(float(numel))
    pieces = verify.in_pieces(values)
    assert len(pieces) <= 256 and (pieces.shape[1] == 256 or len(pieces) > 128)
    assert torch.equal(pieces[~pieces.isnan()], values)


def test_a_row_of_a_large_parameter_is_no_shard() -> None:
    """The gradient of one neuron may cancel out over a batch in one step, and rounding then turns all of its row."""
    expected = reference()
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(2000, 500, generator=generator)
    update = -4 * LR * gradient.sign()
    for tensors, tensor in zip(
        expected, (gradient, update, 0.02 * gradient + update, 0.3 * gradient), strict=True
    ):
        tensors["c.weight"] = tensor
    turned = evidence(expected)
    turned.parameters["c.weight"][700:702] -= update[700:702]
    assert compare(turned, expected, precision="bf16").piece == 0.0
    stale = evidence(expected)
    stale.parameters["c.weight"][1200:1216] -= update[1200:1216] / 4  # less than a hundredth of the parameter
    found = compare(stale, expected, precision="bf16")
    assert found.piece == pytest.approx(0.25, rel=0.05) and found.piece_worst == "c.weight"


def test_a_wrong_weight_decay_shows_where_there_is_no_gradient() -> None:
    expected = reference()
    expected.moments["b.bias"].zero_()
    expected.updates["b.bias"].copy_(-4e-4 * expected.parameters["b.bias"])
    decayed = evidence(expected)
    decayed.parameters["b.bias"] -= expected.updates["b.bias"]
    found = compare(decayed, expected, precision="fp32")
    assert found.piece_worst == "b.bias" and found.piece > 0.5


@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_nan_is_beyond_every_tolerance(kind) -> None:
    expected = reference()
    broken = evidence(expected)
    getattr(broken, kind)["a.weight"].view(-1)[:300] = math.nan
    found = compare(broken, expected, precision="bf16")
    deviation = Deviation(**found.model_dump(), tolerance=dict(TOLERANCES["bf16"]))
    assert exceeded(deviation)


def test_other_parameters_are_an_error() -> None:
    expected = reference()
    missing = evidence(expected)
    del missing.parameters["b.bias"]
    with pytest.raises(VerificationError, match=r"b\.bias"):
        compare(missing, expected, precision="fp32")
    reshaped = evidence(expected)
    reshaped.parameters["b.bias"] = reshaped.parameters["b.bias"].view(7, 10)
    with pytest.raises(VerificationError, match="shape"):
        compare(reshaped, expected, precision="fp32")


def strategy_settings(clip: float | None) -> StrategySettings:
    return StrategySettings(
        rank=0, world_size=1, local_rank=0, local_world_size=1, rendezvous="r", precision="fp32", batch_size=1,
        seq_length=8, clip=clip,
    )  # fmt: skip


def test_the_gradient_is_read_from_the_first_moment() -> None:
    gradient = torch.tensor([3.0, 4.0])
    moments = {"p": 0.1 * gradient}
    assert torch.allclose(
        verify.gradients_of_first_step(moments, strategy_settings(None), None)["p"], gradient
    )
    # Clipped from a norm of 5 to 1: the moment holds a fifth.
    clipped = {"p": 0.1 * gradient / 5}
    found = verify.gradients_of_first_step(clipped, strategy_settings(1.0), 5.0)["p"]
    assert torch.allclose(found, gradient, rtol=1e-5)
    with pytest.raises(Error, match="norm"):
        verify.gradients_of_first_step(clipped, strategy_settings(1.0), None)


def test_the_reference_file_holds_what_was_written(tmp_path) -> None:
    expected = reference()
    initial = {name: parameter - expected.updates[name] for name, parameter in expected.parameters.items()}
    path = tmp_path / "reference.pt"
    verify.write_reference(path, evidence(expected), initial)
    found = verify.read_reference(path)
    assert torch.equal(found.gradients["a.weight"], expected.gradients["a.weight"])
    assert torch.allclose(found.updates["b.bias"], expected.updates["b.bias"], atol=1e-8)


def test_a_reference_that_diverged_is_no_reference(tmp_path) -> None:
    found = evidence(reference())
    initial = {name: torch.zeros_like(tensor) for name, tensor in found.parameters.items()}
    found.parameters["b.bias"][3] = math.inf
    with pytest.raises(VerificationError, match="nothing to compare with: give a lower --lr"):
        verify.write_reference(tmp_path / "reference", found, initial)


def test_the_coarsest_dtype_decides_the_tolerance() -> None:
    fine = RowDtypes(param="float32", compute="float32", reduce="float32", master="float32", state="float32")
    assert tolerance_precision("fp32", fine) == "fp32"
    assert tolerance_precision("bf16", fine) == "bf16"
    assert tolerance_precision("fp32", fine.model_copy(update={"reduce": "bfloat16"})) == "bf16"


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
    assert found.verdict is not None and "loss deviates by 0.02" in found.verdict


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
    unknown = found([None, None], [None, None])  # a peer that does not evaluate
    assert (unknown.evaluation, unknown.reads) == (None, None) and not exceeded(unknown)


def test_a_loss_in_low_precision_may_be_rounded() -> None:
    assert tolerances("bf16") == dict(TOLERANCES["bf16"])
    own = TOLERANCES["bf16"]
    assert tolerances("bf16", loss_dtype="float32") == own
    both = tolerances("bf16", loss_dtype="bfloat16", reference_loss_dtype="bfloat16")
    assert both == own | {"loss": own["loss"] + 2**-6}
    one = tolerances("bf16", loss_dtype="bfloat16", reference_loss_dtype="float32")
    assert one == own | {name: own[name] + 2**-7 for name in ("loss", "evaluation")}


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
    found = verify.Evidence(
        loss=1.0, norm=1.0, gradients=tensors, parameters=tensors, moments=tensors, moment_samples=[],
    )  # fmt: skip
    with pytest.raises(Error, match=r"of 16 MiB could not be written to /dev: .*ulimit -f.*TMPDIR"):
        verify.write_reference(Path("/dev/full"), found, tensors)
