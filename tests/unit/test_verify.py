"""The arithmetic of verification: planted deviations, floors, limits, and the evidence that it takes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from builders import SMALL, make_settings, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from zerobench.bench.protocol.job import TensorDeviation, Verification
from zerobench.bench.protocol.tolerances import (
    TOLERANCES,
    VERIFY_STEPS,
    exceeded,
    tolerance_precision,
    tolerances,
)
from zerobench.bench.rank import deviation, verify
from zerobench.bench.rank.evidence import Evidence, Reference, Tensors
from zerobench.bench.rank.replay import sample
from zerobench.errors import Error, VerificationError
from zerobench.results.schema import Deviation, RowDtypes
from zerobench.strategies.base import LossScaleSettings, OptimizerSettings
from zerobench.strategies.shared import checksum
from zerobench.strategies.single import SingleStrategy

LR = 1e-3
compare = functools.partial(deviation.compare, optimizer=OptimizerSettings(lr=LR, weight_decay=0.0))


def reference() -> Reference:
    """Two parameters after four steps of AdamW, of one learning rate each: the gradient is the same in all of them."""
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
    return Reference(gradients, updates, parameters, {name: 0.3 * g for name, g in gradients.items()})


def evidence(expected: Reference, **changes) -> Evidence:
    tensors = {
        "gradients": {name: tensor.clone() for name, tensor in expected.gradients.items()},
        "parameters": {name: tensor.clone() for name, tensor in expected.parameters.items()},
        "moments": expected.moments,
        "moment_samples": [
            {name: sample((1 - 0.9**step) * g) for name, g in expected.gradients.items()}
            for step in range(1, VERIFY_STEPS + 1)
        ],
    }
    return Evidence(loss=5.0, norm=1.0, **{**tensors, **changes})


def beyond(found: TensorDeviation, precision: str = "bf16") -> list[str]:
    return exceeded(Deviation(**found.model_dump(), tolerance=dict(TOLERANCES[precision])))


def test_equal_is_zero() -> None:
    expected = reference()
    found = compare(evidence(expected), expected, precision="fp32")
    assert (found.gradient, found.update, found.piece, found.max_abs) == (0.0, 0.0, 0.0, 0.0)
    assert found.optimizer < 1e-5 and not beyond(found, "fp32")


@pytest.mark.parametrize("name", ["a.weight", "b.bias"])
def test_the_update_deviates_by_the_norm_of_what_is_off_over_the_norm_of_all(name) -> None:
    expected = reference()
    off = evidence(expected)
    off.parameters[name] -= LR / 2
    found = compare(off, expected, precision="fp32")
    share = expected.parameters[name].numel() / sum(p.numel() for p in expected.parameters.values())
    assert found.update == pytest.approx(math.sqrt(share) / 8, rel=1e-3)  # of four rates
    assert found.max_abs == pytest.approx(LR / 2, rel=1e-3)
    assert found.optimizer_worst == name and found.optimizer == pytest.approx(1 / 8, rel=1e-2)


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
    expected.moments["b.bias"].mul_(1e-9)
    noisy = evidence(expected)
    noisy.gradients["b.bias"].add_(1e-7)
    noisy.parameters["b.bias"].sub_(expected.updates["b.bias"])
    found = compare(noisy, expected, precision="fp32")
    # The model's gradients are about one, and count as a thousandth of that at least.
    assert found.gradient == pytest.approx(1e-7 / 1e-3, rel=0.1)
    assert found.piece == 0.0


@pytest.mark.parametrize("precision", TOLERANCES)
def test_what_is_an_eighth_as_loud_as_the_model_is_no_noise_in_any_precision(precision) -> None:
    expected = reference()
    for tensors in (expected.gradients, expected.moments):
        tensors["b.bias"].copy_(expected.gradients["b.bias"].sign() / 8)
    off = evidence(expected)
    off.gradients["b.bias"] /= 2
    off.parameters["b.bias"] -= expected.updates["b.bias"] / 4
    found = compare(off, expected, precision=precision)
    assert found.gradient == pytest.approx(0.5, rel=0.01)
    assert found.piece == pytest.approx(0.25, rel=0.05) and found.piece_worst == "b.bias"


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


def test_a_large_parameter_hides_no_stale_shard_behind_its_rounding() -> None:
    expected = reference()
    for parameter in expected.parameters.values():
        parameter += 30.0
    stale = evidence(expected)
    stale.parameters["b.bias"] -= expected.updates["b.bias"] / 4
    assert compare(stale, expected, precision="fp32").piece == pytest.approx(0.25, rel=0.1)


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
    pieces = deviation.in_pieces(values, deviation.piece_numel_of(numel))
    assert len(pieces) <= 256 and (pieces.shape[1] == 256 or len(pieces) > 128)
    assert torch.equal(pieces[~pieces.isnan()], values)


@pytest.mark.parametrize("numel_at_once", [1, 1000, 1 << 40])
def test_parts_that_are_compared_at_once_change_nothing(monkeypatch, numel_at_once) -> None:
    expected = reference()
    off = evidence(expected)
    for name, gradient in expected.gradients.items():
        off.gradients[name] += 0.01 * gradient.flip(0)
        off.parameters[name] += 0.1 * LR * gradient.flip(0)
    usual = compare(off, expected, precision="bf16")
    monkeypatch.setattr(deviation, "_numel_at_once", lambda device: numel_at_once)
    found = compare(off, expected, precision="bf16")
    assert usual.gradient > 0.01 and usual.piece > 0.01
    assert found == usual.model_copy(
        update={"gradient": pytest.approx(usual.gradient), "update": pytest.approx(usual.update)}
    )


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


@pytest.mark.parametrize(
    ("kind", "shown"), [("gradients", ["gradient"]), ("parameters", ["update", "piece", "optimizer"])]
)
def test_nan_is_beyond_every_tolerance(kind, shown) -> None:
    expected = reference()
    broken = evidence(expected)
    tensors = getattr(broken, kind)
    tensors["a.weight"].view(-1)[:300] = math.nan
    tensors["b.bias"][:5] *= 2  # numbers, and behind it
    found = compare(broken, expected, precision="bf16")
    assert beyond(found) == shown
    if kind == "gradients":
        assert math.isnan(found.gradient) and found.gradient_worst == "a.weight"
    else:
        assert math.isnan(found.max_abs) and found.optimizer_worst == "a.weight"


def test_other_parameters_are_an_error() -> None:
    expected = reference()
    missing = evidence(expected)
    del missing.parameters["b.bias"]
    with pytest.raises(VerificationError, match=r"b\.bias"):
        compare(missing, expected, precision="fp32")
    further = evidence(expected)
    further.parameters["c"] = torch.zeros(3)
    with pytest.raises(VerificationError, match=r"unknown \['c'\]"):
        compare(further, expected, precision="fp32")
    silent = evidence(expected)
    del silent.gradients["b.bias"]
    with pytest.raises(VerificationError, match=r"missing \['b.bias'\]"):
        compare(silent, expected, precision="fp32")
    reshaped = evidence(expected)
    reshaped.parameters["b.bias"] = reshaped.parameters["b.bias"].view(7, 10)
    with pytest.raises(VerificationError, match="shape"):
        compare(reshaped, expected, precision="fp32")


def test_the_gradient_is_read_from_the_first_moment() -> None:
    gradient = torch.tensor([3.0, 4.0])
    moments = {"p": 0.1 * gradient}
    assert torch.allclose(
        verify.gradients_of_first_step(moments, make_settings(clip=None), None)["p"], gradient
    )
    # Clipped from a norm of 5 to 1: the moment holds a fifth.
    clipped = {"p": 0.1 * gradient / 5}
    found = verify.gradients_of_first_step(clipped, make_settings(clip=1.0), 5.0)["p"]
    assert torch.allclose(found, gradient, rtol=1e-5)
    below = {"p": 0.1 * gradient}  # a norm that is not clipped
    assert torch.allclose(
        verify.gradients_of_first_step(below, make_settings(clip=7.0), 5.0)["p"], gradient, rtol=1e-5
    )
    with pytest.raises(Error, match="norm"):
        verify.gradients_of_first_step(clipped, make_settings(clip=1.0), None)


SEQ_LENGTH = 8
small_model = functools.partial(tiny_model, **SMALL | {"max_seq_length": SEQ_LENGTH})


def batch_of(step: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(31, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": ids, "labels": ids}]


def small_evidence(**settings) -> Evidence:
    strategy = SingleStrategy(make_settings(batch_size=2, seq_length=SEQ_LENGTH, **settings))
    strategy.build(small_model)
    try:
        return verify.gather_evidence(strategy, batch_of, held_out=batch_of(99)[0])
    finally:
        strategy.close()


def apart(found: Tensors, expected: Tensors) -> float:
    """Norm of the difference over the norm: noise in a gradient that is none moves a few elements by a rate."""
    difference = sum(deviation.squares(found[name] - tensor.detach()) for name, tensor in expected.items())
    return math.sqrt(difference / sum(deviation.squares(tensor.detach()) for tensor in expected.values()))


@pytest.mark.parametrize("clip", [None, 0.1, 1e3])
def test_evidence_is_of_the_first_step_and_of_the_last(clip) -> None:
    model = small_model()
    loss = model(**batch_of(0)[0]).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    optimizer.step()
    for step in range(1, VERIFY_STEPS):
        optimizer.zero_grad()
        model(**batch_of(step)[0]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        optimizer.step()
    found = small_evidence(clip=clip)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert found.norm == pytest.approx(float(norm), rel=1e-5)
    named = dict(model.named_parameters())
    assert apart(found.gradients, gradients) < 1e-5
    assert apart(found.parameters, named) < 1e-3
    assert apart(found.moments, {name: optimizer.state[p]["exp_avg"] for name, p in named.items()}) < 1e-3
    for name, moment in found.moments.items():
        assert torch.equal(found.moment_samples[-1][name], sample(moment))
    assert len(found.moment_samples) == VERIFY_STEPS
    with torch.no_grad():
        assert found.evaluation == pytest.approx(model(**batch_of(99)[0]).loss.item(), rel=1e-5)


@pytest.mark.slow
def test_a_step_that_overflow_skipped_is_made_again_of_the_same_batch() -> None:
    """So that strategies that skip at different scales still make the same updates."""
    right = small_evidence(precision="fp16", loss_scale=LossScaleSettings(initial_scale=2.0**10))
    late = small_evidence(precision="fp16", loss_scale=LossScaleSettings(initial_scale=2.0**24))
    other = small_evidence(precision="fp16", optimizer=OptimizerSettings(lr=1.1 * LR))
    assert 10 * apart(late.parameters, right.parameters) < apart(other.parameters, right.parameters)
    with pytest.raises(VerificationError, match="step 1 overflowed fp16 41 times in a row"):
        small_evidence(precision="fp16", loss_scale=LossScaleSettings(initial_scale=2.0**100))


def test_rank_0_compares_and_every_rank_says_what_it_saw(tmp_path) -> None:
    path = tmp_path / "reference.pt"
    expected = reference()
    initial = {name: parameter - expected.updates[name] for name, parameter in expected.parameters.items()}
    verify.write_reference(path, evidence(expected), initial)
    off = evidence(expected)
    off.gradients["a.weight"] *= 1.5

    def verified(*, is_first: bool) -> Verification:
        return verify.verify_row(
            off, reference_file=path, precision="fp32", optimizer=OptimizerSettings(lr=LR, weight_decay=0.0),
            is_first=is_first, device=torch.device("cpu"), tick=lambda: None,
        )  # fmt: skip

    first, other = verified(is_first=True), verified(is_first=False)
    assert first.checksum == checksum(off.parameters) and other.checksum is None
    assert first.deviation is not None and beyond(first.deviation, "fp32") == ["gradient"]
    assert other.deviation is None
    assert (first.loss, first.norm) == (other.loss, other.norm) == (off.loss, off.norm)


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
    for role in ("param", "compute", "reduce"):
        assert tolerance_precision("fp32", fine.model_copy(update={role: "bfloat16"})) == "bf16"
        assert tolerance_precision("bf16", fine.model_copy(update={role: "float16"})) == "bf16"
        assert tolerance_precision("fp32", fine.model_copy(update={role: "float16"})) == "fp16"
    assert tolerance_precision("fp32", fine.model_copy(update={"compute": "tf32"})) == "fp16"


@pytest.mark.parametrize("precision", TOLERANCES)
@given(st.dictionaries(st.sampled_from(list(TOLERANCES["fp32"])), st.sampled_from([0.5, 1.0, 1.5, math.nan])))
def test_each_quantity_has_its_own_limit(precision, times) -> None:
    """A limit itself is still within; NaN is beyond any."""
    allowed = TOLERANCES[precision]
    values = {name: factor * (allowed[name] or factor > 1) for name, factor in times.items()}
    deviation = Deviation(**values, tolerance=dict(allowed))
    assert set(exceeded(deviation)) == {name for name, factor in times.items() if not factor <= 1}


def test_a_loss_in_low_precision_may_be_rounded() -> None:
    assert tolerances("bf16") == dict(TOLERANCES["bf16"])
    own = TOLERANCES["bf16"]
    assert tolerances("bf16", loss_dtype="float32") == own
    both = tolerances("bf16", loss_dtype="bfloat16", reference_loss_dtype="bfloat16")
    assert both == own | {"loss": own["loss"] + 2**-6}
    one = tolerances("bf16", loss_dtype="bfloat16", reference_loss_dtype="float32")
    assert one == own | {name: own[name] + 2**-7 for name in ("loss", "evaluation")}
