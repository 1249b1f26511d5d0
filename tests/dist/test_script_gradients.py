"""Scripts that read and change gradients through ``engine.gradients()``."""

from __future__ import annotations

import functools

import pytest
import script_runs
import small_models
import torch
import zoo
from script_engines import (
    NAME,
    PLACES,
    TOLERANCES,
    Plain,
    backward,
    end,
    expect_close,
    expect_same_everywhere,
    last,
    start,
    train,
    untouched,
)

from zerobench.errors import CommunicationError, ConfigError, StateError


@functools.cache
def plain_gradients(world_size, precision, micros):
    plain = Plain(world_size, precision)
    plain.backward(0, micros=range(micros))
    return plain.gradients()


def reading_gradients(rank, place, precision, micros):
    """Read full, averaged, unscaled float32 gradients, and step as if nobody had read them."""
    engine = start(rank, place, precision=precision, gradient_accumulation_steps=micros)
    expected = plain_gradients(rank.world_size, precision, micros)
    for step in range(2):
        backward(engine, rank, step, micros=range(micros))
        for modifier in (last(rank), None, 0, "all"):
            with engine.gradients(modifier_rank=modifier) as grads:
                assert len(grads) == len(expected) and list(grads.keys()) == list(grads)
                found = {name: grad.clone() for name, grad in grads.items()}
            assert all(grad.dtype == torch.float32 for grad in found.values())
            assert all(found[name].shape == expected[name].shape for name in expected)
            if step == 0:
                distance = zoo.relative(found, expected)
                assert distance <= TOLERANCES[precision][0], (modifier, distance)
            norm = torch.stack([grad.norm() for grad in found.values()]).norm().item()
            assert engine.grad_norm() == pytest.approx(norm, rel=1e-5)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    digest = end(engine)["digest"]
    assert digest == untouched(rank, place, micros=micros, precision=precision)
    return digest, zoo.digest(found)


def only_reading(rank, place):
    """Raise on every change inside gradients(modifier_rank=None), on every rank, and step as if there was none."""
    engine = start(rank, place)
    backward(engine, rank, 0)

    def in_place(grads):
        grads[NAME].mul_(2.0)

    def one_element(grads):
        grads[NAME].view(-1)[-1] += 1.0

    def by_data(grads):
        grads["outlet.bias"].data.add_(1.0)

    def by_set_data(grads):
        grads["inlet.weight"].data = torch.zeros_like(grads["inlet.weight"])

    def by_foreach(grads):
        torch._foreach_mul_(list(grads.values()), 0.5)

    for change in (in_place, one_element, by_data, by_set_data, by_foreach):
        with (
            pytest.raises(StateError, match=r"modifier_rank=None.*only reads"),
            engine.gradients(None) as grads,
        ):
            change(grads)
    for value in (None, torch.zeros(2 * small_models.WIDTH, small_models.WIDTH)):
        with engine.gradients(None) as grads, pytest.raises(StateError, match="only reads"):
            grads[NAME] = value
    changes = rank.rank == last(rank)
    kind = StateError if changes else CommunicationError  # other ranks learn which rank made an error
    with pytest.raises(kind, match=NAME), engine.gradients(None) as grads:
        if changes:
            in_place(grads)
    engine.step()
    train(engine, rank, [1])
    assert end(engine)["digest"] == untouched(rank, place)


def misusing_gradients(rank, place):
    """Raise the named errors for wrong names, shapes, values, moments and ranks; the step stays right."""
    engine = start(rank, place, gradient_accumulation_steps=2)

    def expect_too_early(text):
        for call in (
            lambda: engine.gradients().__enter__(),
            engine.grad_norm,
            lambda: engine.clip_grad_norm_(1.0),
        ):
            with pytest.raises(StateError, match=text):
                call()

    expect_too_early("without gradients")
    backward(engine, rank, 0)
    expect_too_early("after 1 of 2 micro-batches")
    backward(engine, rank, 0, micros=[1])
    with engine.gradients(modifier_rank=0) as grads:
        assert NAME in grads and "outlet" not in grads
        for call in (lambda: grads["outlet"], lambda: grads.__setitem__("module.outlet.bias", None)):
            with pytest.raises(KeyError, match="outlet"):
                call()
        for value, words in (
            (torch.zeros(3), r"shape \(48, 24\)"),
            (torch.zeros(24, 48), r"shape \(48, 24\)"),
            (torch.zeros(48, 24, dtype=torch.int64), "floating-point"),
            (1.0, "floating-point"),
        ):
            with pytest.raises(ConfigError, match=words):
                grads[NAME] = value
        with pytest.raises(StateError, match="cannot be deleted"):
            del grads[NAME]
    with pytest.raises(StateError, match="after the block"):
        grads[NAME] = None
    for modifier in (rank.world_size, -1, True, "each", 0.5):
        with pytest.raises(ConfigError, match="modifier_rank must be"), engine.gradients(modifier):
            pass
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_norm"):
            engine.clip_grad_norm_(limit)
    with pytest.raises(ZeroDivisionError), engine.gradients(0):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), engine.gradients(None):
        raise ZeroDivisionError
    engine.step()
    expect_too_early("without gradients")
    train(engine, rank, [1], micros=2)
    assert end(engine)["digest"] == untouched(rank, place, micros=2)


def in_backward(rank, place):
    """Raise StateError where optimizer_in_backward has used the gradients already; training stays right."""
    engine = start(rank, place, optimizer_in_backward=True)
    for step in range(2):
        engine.zero_grad()
        backward(engine, rank, step)
        for call in (
            lambda: engine.gradients().__enter__(),
            engine.grad_norm,
            lambda: engine.clip_grad_norm_(1.0),
            engine.zero_grad,
            engine.drop_gradients,
        ):
            with pytest.raises(StateError, match="optimizer_in_backward"):
                call()
        engine.step()
    digest = end(engine)["digest"]
    assert digest == untouched(rank, place, optimizer_in_backward=True)
    return digest


def halve(grads):
    for grad in grads.values():
        grad.mul_(0.5)


def write_one(grads):
    grads[NAME] = torch.full((48, 24), 0.01)


def write_turned(grads):
    grads[NAME] = torch.linspace(-1, 1, 48 * 24, dtype=torch.float64).view(24, 48).t().requires_grad_(True)


def write_expanded(grads):
    grads["outlet.bias"] = torch.tensor(0.25).expand(3)
    grads["inlet.weight"] = grads["inlet.weight"] + 1.0


def write_from_another(grads):
    grads["blocks.0.up.weight"], grads[NAME] = grads[NAME], grads["blocks.0.up.weight"]


def set_data_of_one(grads):
    grads[NAME].data = -grads[NAME].data


CHANGES = {
    "halve": halve,
    "write one": write_one,
    "write a view": write_turned,
    "write an expanded one": write_expanded,
    "swap two": write_from_another,
    "data": set_data_of_one,
    "hold one": lambda grads: grads.__setitem__(NAME, None),
    "hold and write": lambda grads: (grads.__setitem__("outlet.bias", None), write_one(grads)),
    "hold and take back": lambda grads: (grads.__setitem__(NAME, None), write_one(grads)),
}


@functools.cache
def plain_with_changes(world_size, precision):
    plain = Plain(world_size, precision)
    for step, change in enumerate(CHANGES.values()):
        plain.backward(step)
        grads = plain.gradients()
        change(grads)
        for name, parameter in plain.named.items():
            parameter.grad = None if grads[name] is None else grads[name].detach().float().contiguous()
        plain.step()
    return plain.state()


def changing_gradients(rank, place, precision):
    """Use the changed gradients, whoever makes the changes: with plain PyTorch's results, the same bits everywhere."""
    digests = []
    for modifier in (0, last(rank), "all") if rank.world_size > 1 else (0, "all"):
        engine = start(rank, place, precision=precision)
        for step, change in enumerate(CHANGES.values()):
            backward(engine, rank, step)
            with engine.gradients(modifier_rank=modifier) as grads:
                if modifier in ("all", rank.rank):
                    change(grads)
                else:  # lost
                    for grad in grads.values():
                        grad.fill_(float("nan"))
                    grads["outlet.weight"] = None
            engine.step()
        found = end(engine)
        digests.append(found["digest"])
        expect_close(found, plain_with_changes(rank.world_size, precision), precision)
    assert len(set(digests)) == 1, digests
    expect_same_everywhere(("changes", precision, rank.world_size), place, digests[0])
    return digests


def changing_differently(rank, place):
    """Raise StateError on every rank that names the parameter which ranks changed differently, and change nothing."""
    if rank.world_size == 1:
        return
    engine = start(rank, place)
    backward(engine, rank, 0)

    def on_all(grads):
        grads[NAME].add_(0.1 * rank.rank)

    def on_last(grads):
        if rank.rank == last(rank):
            grads[NAME].view(-1)[7] += 1.0

    def hold_on_last(grads):
        if rank.rank == last(rank):
            grads[NAME] = None

    def permute_on_last(grads):
        if rank.rank == last(rank):
            grads[NAME].copy_(grads[NAME].flip(0))

    def assign_on_last(grads):
        if rank.rank == last(rank):
            grads[NAME] = torch.ones(48, 24)

    for change in (on_all, on_last, hold_on_last, assign_on_last, permute_on_last):
        raises = pytest.raises(StateError, match=rf"changed the gradient of '{NAME}' differently")
        try:
            with raises, engine.gradients("all") as grads:
                change(grads)
        except BaseException as error:
            raise AssertionError(change.__name__) from error
    engine.step()
    train(engine, rank, [1])
    assert end(engine)["digest"] == untouched(rank, place)


CHECKS = [
    *((reading_gradients, (place, "fp32", 1)) for place in PLACES),
    *((reading_gradients, (place, "fp32", 2)) for place in PLACES),
    *((reading_gradients, (place, "bf16", 1)) for place in PLACES),
    *((reading_gradients, (place, "bf16", 2)) for place in ("1", "3", "2 host")),
    *((reading_gradients, (place, "fp16", 1)) for place in ("0", "2", "3", "3 host")),
    *((only_reading, (place,)) for place in PLACES),
    *((misusing_gradients, (place,)) for place in PLACES),
    *((in_backward, (place,)) for place in PLACES),
    *((changing_gradients, (place, "fp32")) for place in PLACES),
    *((changing_gradients, (place, "bf16")) for place in PLACES),
    *((changing_differently, (place,)) for place in PLACES),
]


RUNS = script_runs.Runs(
    CHECKS,
    several_ranks=(changing_differently,),
    on_two_places=(misusing_gradients, only_reading, in_backward),
    swapped=(reading_gradients, changing_gradients),
)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_rewrite_gradients(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)
