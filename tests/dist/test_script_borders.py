"""Training scripts that use gradients and parameters besides forward, backward and step: right, or an error.

Each check runs in every place (stage and tier) that it names, on 1, 2 and 3 ranks. All checks of a kind and a number of
ranks share one group of processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping

import border_scripts
import pytest
import ranks
import small_models
import torch
import zoo
from border_scripts import (
    CASE,
    DTYPES,
    PLACES,
    TOLERANCES,
    Plain,
    backward,
    end,
    expect_close,
    expect_same_everywhere,
    keeps_masters_apart,
    plainly,
    start,
    train,
)
from noticed import noticed
from torch import nn

from zerobench.errors import CommunicationError, ConfigError, StateError

NAME = "blocks.1.up.weight"
NAMES_GRADIENTS = r"engine\.gradients\(\)"


def nothing(*_):
    """Leave everything as it is."""


@functools.cache
def _untouched_digests():
    return {}


def untouched(rank, place, *, micros=1, steps=2, **config):
    """Return the digest of an ordinary training in this place."""
    known = _untouched_digests()
    key = (place, rank.world_size, micros, steps, repr(config))
    if key not in known:
        engine = start(rank, place, gradient_accumulation_steps=micros, **config)
        train(engine, rank, range(steps), micros=micros)
        known[key] = end(engine)["digest"]
    return known[key]


# --- 1. `.grad` between backward and step ---------------------------------------------------------------------------


def unscale(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


def add_in_place(model):
    with torch.no_grad():
        model.get_parameter(NAME).grad += 1.0


TOUCHES = {
    "clone": lambda model: model.get_parameter(NAME).grad.clone(),
    "norm": lambda model: model.get_parameter(NAME).grad.norm(),
    "item of the sum": lambda model: model.get_parameter(NAME).grad.sum().item(),
    "add in place": add_in_place,
    "fill through data": lambda model: model.get_parameter(NAME).grad.data.fill_(1.0),
    "multiply by a factor": lambda model: model.get_parameter(NAME).grad.mul_(0.5),
    "print": lambda model: str(model.get_parameter(NAME).grad),
    "numpy": lambda model: model.get_parameter(NAME).grad.numpy()[0],
    "index": lambda model: model.get_parameter(NAME).grad[0, 0].item(),
    "copy elsewhere": lambda model: (
        torch.empty(()).new_empty(100, 100)[:48, :24].copy_(model.get_parameter(NAME).grad)
    ),
    "isnan": lambda model: torch.isnan(model.get_parameter(NAME).grad).any().item(),
    "stack": lambda model: torch.stack([p.grad.float().norm() for p in model.parameters()]),
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_, foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "get_total_norm": lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "foreach norms": lambda model: torch._foreach_norm([p.grad for p in model.parameters()]),
    "foreach multiply": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    "another optimizer's step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "zero in place": lambda model: model.zero_grad(set_to_none=False),
    "unscale_": unscale,
}


def touching_gradients(rank, place, precision):
    """Raise on every touch of `.grad`, serve its metadata, and step as if nobody had tried."""
    engine = start(rank, place, precision=precision)
    model = engine.module
    if PLACES[place]["stage"] == 3:  # torch's step touches the parameters first
        touches = {name: touch for name, touch in TOUCHES.items() if name != "another optimizer's step"}
    else:
        touches = TOUCHES
    for step in range(2):
        assert all(p.grad is None for p in model.parameters())
        backward(engine, rank, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.shape == parameter.shape and parameter.grad.numel() == parameter.numel()
            assert parameter.grad.dtype == parameter.dtype == DTYPES[precision]
            assert parameter.grad.device == parameter.device and not parameter.grad.requires_grad
        for name, touch in touches.items() if step else ():
            if (precision, name) in (("fp16", "unscale_"), ("bf16", "numpy")):
                continue  # torch refuses these dtypes by errors of its own
            try:
                with pytest.raises(RuntimeError, match=NAMES_GRADIENTS):
                    touch(model)
            except BaseException as error:
                raise AssertionError(name) from error
        engine.step()
        assert all(p.grad is None for p in model.parameters())
    digest = end(engine)["digest"]
    assert digest == untouched(rank, place, precision=precision)
    return digest


def gone_while_computing(rank, place):
    """Find no `.grad` in a forward and in a backward, whichever micro-batch of the window it is."""
    engine = start(rank, place, gradient_accumulation_steps=3)
    model, seen = engine.module, []

    def look(*_):
        seen.append(all(p.grad is None for p in model.parameters()))

    def watch(output):
        if output.requires_grad:
            output.register_hook(look)

    model.blocks[1].register_forward_pre_hook(look)
    model.outlet.register_forward_hook(lambda module, args, output: watch(output))
    for micro in range(3):
        assert all((p.grad is None) == (micro == 0) for p in model.parameters())
        loss = engine(**CASE.batch(0, rank.rank, micro))
        assert all((p.grad is None) == (micro == 0) for p in model.parameters())
        engine.backward(loss)
        assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():  # an evaluation inside the window
        engine(**CASE.batch(9, rank.rank, 0))
    assert all(p.grad is not None for p in model.parameters())
    engine.step()
    assert seen == [True] * 7
    engine.close()
    assert all(p.grad is None for p in model.parameters())


def frozen_have_none(rank, place):
    """Give no `.grad` to frozen parameters; `zero_grad` of the module drops the window all the same."""
    case = zoo.CASES["frozen"]
    digests = []
    for drops in (False, True):
        engine = start(rank, place, case=case)
        if drops:
            backward(engine, rank, 5, case=case)
            for parameter in engine.module.parameters():
                assert (parameter.grad is not None) == parameter.requires_grad
            engine.module.zero_grad()
        train(engine, rank, range(2), case=case)
        digests.append(end(engine)["digest"])
    assert digests[0] == digests[1]


def plain_backward(rank, place):
    """Raise the error that names engine.backward for a plain backward between backward and step."""
    engine = start(rank, place)
    for step in range(2):
        engine.backward(engine(**CASE.batch(step, rank.rank, 0)))
        other = engine(**CASE.batch(step, rank.rank, 1))
        with pytest.raises(
            RuntimeError, match=r"engine\.backward\(loss\)"
        ):  # torch makes one of a StateError
            other.backward()
        assert all(p.grad is None or p.grad.shape == p.shape for p in engine.module.parameters())
        engine.step()
        assert all(p.grad is None for p in engine.module.parameters())
    digest = end(engine)["digest"]
    assert digest == untouched(rank, place)
    return digest


def swap(model):
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.grad, second.grad = second.grad, first.grad


def set_data(model):
    model.outlet.weight.grad.data = torch.ones_like(model.outlet.weight.grad, device="cpu")


def none_for(*names):
    def tamper(model):
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.grad = None

    return tamper


def replace_for(*names):
    def tamper(model):
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.grad = torch.full(parameter.shape, 100.0, dtype=parameter.dtype)

    return tamper


TAMPERINGS = {
    "None for one": none_for(NAME),
    "None for a layer": none_for("outlet"),
    "None for all but one": none_for("inlet", "blocks"),
    "None for the first": none_for("inlet.weight"),
    "a tensor for one": replace_for(NAME),
    "a tensor for all": replace_for("inlet", "blocks", "outlet"),
    "a tensor for one and None for others": lambda model: (
        none_for("inlet")(model),
        replace_for("outlet")(model),
    ),
    "data of one": set_data,
    "swapped": swap,
}


def tampering(rank, place, precision):
    """Raise at the next call, whichever it is, and go on as if the script had left `.grad` alone."""
    engine = start(rank, place, gradient_accumulation_steps=2, precision=precision)

    def expect_error(how, call):
        TAMPERINGS[how](engine.module)
        with pytest.raises(StateError, match=NAMES_GRADIENTS):
            call()
            pytest.fail(f"{how} went unnoticed")

    for step, how in enumerate(TAMPERINGS):
        backward(engine, rank, step)
        expect_error(how, lambda step=step: engine(**CASE.batch(step, rank.rank, 1)))
        loss = engine(**CASE.batch(step, rank.rank, 1))
        expect_error(how, lambda loss=loss: engine.backward(loss))
        engine.backward(loss)
        calls = (engine.step, engine.grad_norm, lambda: engine.gradients().__enter__(), engine.zero_grad)
        expect_error(how, calls[step % len(calls)])
        engine.step()
    train(engine, rank, [len(TAMPERINGS)], micros=2)
    assert end(engine)["digest"] == untouched(
        rank, place, micros=2, steps=len(TAMPERINGS) + 1, precision=precision
    )


KIND_1 = [
    *((touching_gradients, (place, "fp32")) for place in PLACES),
    *(
        (touching_gradients, (place, "bf16"))
        for place in ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme")
    ),
    *((touching_gradients, (place, "fp16")) for place in ("1", "3", "2 host")),
    *((gone_while_computing, (place,)) for place in PLACES),
    *((frozen_have_none, (place,)) for place in PLACES),
    *((plain_backward, (place,)) for place in PLACES),
    *((tampering, (place, "fp32")) for place in PLACES),
    *((tampering, (place, "bf16")) for place in ("2", "3", "2 host")),
    *((tampering, (place, "fp16")) for place in ("0", "3")),
]


# --- 2. Dropping a window -------------------------------------------------------------------------------------------


def set_all_to_none(engine):
    for parameter in engine.module.parameters():
        parameter.grad = None


DROPS = {
    "engine.zero_grad": lambda engine: engine.zero_grad(),
    "engine.drop_gradients": lambda engine: engine.drop_gradients(),
    "optimizer.zero_grad": lambda engine: engine.optimizer.zero_grad(),
    "module.zero_grad": lambda engine: engine.module.zero_grad(),
    "another optimizer's": lambda engine: torch.optim.SGD(engine.module.parameters(), lr=0.1).zero_grad(),
    "every .grad": set_all_to_none,
    "not to None": lambda engine: engine.zero_grad(set_to_none=False),
    "optimizer, not to None": lambda engine: engine.optimizer.zero_grad(set_to_none=False),
}


def dropping_nothing(rank, place, precision):
    """Do nothing where no gradient is held: before the first step, after each step, and twice."""
    engine = start(rank, place, precision=precision)
    for step in range(2):
        for drop in DROPS.values():
            drop(engine)
            drop(engine)
        train(engine, rank, [step])
        for drop in DROPS.values():
            drop(engine)
    assert end(engine)["digest"] == untouched(rank, place, precision=precision)


def spoilt(batch, kind):
    return {**batch, "x": batch["x"] * {"large": 1e3, "not a number": float("nan")}[kind]}


def dropping(rank, place, precision, kind):
    """Drop a bad micro-batch and what came before it, wherever in the window it is, and train on as without it."""
    engine = start(rank, place, precision=precision, gradient_accumulation_steps=4)
    for step, (how, drop) in enumerate(DROPS.items()):
        before = step % 4
        backward(engine, rank, 50 + step, micros=range(before))
        engine.backward(engine(**spoilt(CASE.batch(step, rank.rank, 9), kind)))
        drop(engine)
        for micro in range(4):
            backward(engine, rank, step, micros=[micro])
            assert engine.is_gradient_accumulation_boundary() == (micro >= 2), how
            engine.step()
    found = end(engine)
    steps = len(DROPS)
    assert found["digest"] == untouched(rank, place, micros=4, steps=steps, precision=precision)
    expect_close(found, plainly(rank.world_size, precision, micros=(4,) * steps), precision)
    expect_same_everywhere(
        ("dropping", precision, rank.world_size, PLACES[place]["stage"] > 1), place, found["digest"]
    )
    return found["digest"]


def boundary_after_a_drop(rank, place):
    """Count micro-batches from the drop on, also before the next forward."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    for how, drop in DROPS.items():
        backward(engine, rank, 0)
        assert engine.is_gradient_accumulation_boundary()
        drop(engine)
        assert not engine.is_gradient_accumulation_boundary(), how
        backward(engine, rank, 0)
        engine.step()
        assert engine.global_steps == 0, how
        engine.zero_grad()
    engine.close()


def ranks_disagree(rank, place, how):
    """Raise the step's CommunicationError where one rank dropped its window and others did not."""
    if rank.world_size == 1:
        return
    engine = start(rank, place, gradient_accumulation_steps=4, timeout_s=5.0)
    train(engine, rank, [0], micros=4)
    backward(engine, rank, 1, micros=range(2))
    if rank.rank == rank.world_size - 1:
        DROPS[how](engine)
    backward(engine, rank, 1, micros=[2])
    with pytest.raises(CommunicationError, match=r"gradients of \d backwards"):
        engine.step(end_window=True)
    engine.close()


def ranks_disagree_on_a_whole_window(rank, place):
    """Raise CommunicationError where one rank dropped a whole window and made another."""
    if rank.world_size == 1:
        return
    engine = start(rank, place, timeout_s=1.0 if PLACES[place]["stage"] == 3 else 5.0)
    train(engine, rank, [0])
    backward(engine, rank, 1)
    if rank.rank == 0:
        engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises((CommunicationError, StateError)) as raised:
        if rank.rank == 0:
            backward(engine, rank, 1)
        engine.step()
        engine.get_global_grad_norm()
    assert isinstance(raised.value, CommunicationError), raised.value
    with pytest.raises(CommunicationError):
        backward(engine, rank, 2)
    engine.close()


def dropping_before_each(rank, place, how):
    """Warn once a window was dropped as often as it has micro-batches, since no step will come."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    for micro in range(4):
        DROPS[how](engine)
        with noticed() as texts:
            backward(engine, rank, 0, micros=[micro])
            engine.step()
        assert not texts
    assert engine.global_steps == 0
    with noticed() as texts:
        DROPS[how](engine)
    assert ["4 unfinished windows" in text for text in texts] == [True] * (rank.rank == 0)
    with noticed() as texts:
        train(engine, rank, range(2), micros=4)
        backward(engine, rank, 5)
        engine.zero_grad()  # the count begins again
    assert not [text for text in texts if "a step takes" not in text]  # the disk of the tests is slow
    assert end(engine)["digest"] == untouched(rank, place, micros=4)


def dropping_inside(rank, place):
    """Raise StateError for a drop inside a forward, and nothing else happens to it."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    backward(engine, rank, 0)
    handle = engine.module.blocks[1].register_forward_pre_hook(lambda *_: engine.zero_grad())
    with pytest.raises(StateError, match="inside a forward or backward"):
        engine(**CASE.batch(0, rank.rank, 1))
    handle.remove()
    engine.zero_grad()
    train(engine, rank, range(2), micros=2)
    assert end(engine)["digest"] == untouched(rank, place, micros=2)


KIND_2 = [
    *((dropping_nothing, (place, "fp32")) for place in PLACES),
    *((dropping_nothing, (place, "bf16")) for place in ("2", "3 all host")),
    *((dropping, (place, "fp32", "large")) for place in PLACES),
    *((dropping, (place, "fp32", "not a number")) for place in PLACES),
    *(
        (dropping, (place, "bf16", "large"))
        for place in ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme")
    ),
    *((dropping, (place, "fp16", "not a number")) for place in ("0", "3", "1 host")),
    *((boundary_after_a_drop, (place,)) for place in ("0", "3")),
    *((ranks_disagree, (place, "engine.zero_grad")) for place in PLACES),
    *(
        (ranks_disagree, (place, how))
        for place in ("0", "3")
        for how in ("module.zero_grad", "another optimizer's")
    ),
    *((ranks_disagree_on_a_whole_window, (place,)) for place in ("0", "1", "2", "3", "2 host")),
    *((dropping_before_each, (place, "engine.zero_grad")) for place in PLACES),
    *((dropping_before_each, (place, "optimizer.zero_grad")) for place in ("0", "3")),
    *((dropping_inside, (place,)) for place in PLACES),
]


# --- 3. engine.gradients() ------------------------------------------------------------------------------------------


def last(rank):
    return rank.world_size - 1


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


def named_by(prefixes, names):
    return [name for name in names if name.startswith(prefixes)]


def hold_as_dino(step, names):
    """Hold the last layer for 30 steps, and a second parameter in every third step."""
    held = named_by(("outlet",), names) if step < 30 else []
    return [*held, "blocks.1.up.weight"] if step % 3 == 1 else held


def hold_at_random(step, names):
    """Hold a third of the parameters, others in each step, with the same seed on every rank."""
    drawn = torch.rand(len(names), generator=torch.Generator().manual_seed(step))
    return [name for name, number in zip(sorted(names), drawn, strict=True) if number < 0.33]


def hold_all_but_one(step, names):
    """Hold everything but one parameter in some steps, and everything in one."""
    names = sorted(names)
    return names if step == 3 else names[1:] if step % 2 else []


HELD = {  # case, pattern, steps, precision, configuration
    "dino": (CASE, hold_as_dino, 50, "fp32", {"optimizer": {"lr": zoo.LR, "weight_decay": 0.1}}),
    "dino bf16": (CASE, hold_as_dino, 36, "bf16", {"optimizer": {"lr": zoo.LR, "weight_decay": 0.1}}),
    "dino fp16": (CASE, hold_as_dino, 10, "fp16", {}),
    "odd sizes and groups": (zoo.CASES["odd sizes"], hold_at_random, 8, "fp32", {}),
    "L2": (
        CASE,
        hold_at_random,
        8,
        "fp32",
        {"optimizer": {"type": "adam", "lr": zoo.LR, "weight_decay": 0.1}},
    ),
    "tied": (zoo.CASES["tied"], hold_at_random, 6, "fp32", {}),
    "nearly all": (zoo.CASES["param groups and schedule"], hold_all_but_one, 6, "fp32", {}),
    "clipped": (CASE, hold_at_random, 6, "fp32", {"gradient_clipping": 0.05}),
}


def counts_of(pattern, names, steps):
    held = dict.fromkeys(names, 0)
    for step in range(steps):
        for name in pattern(step, names):
            held[name] += 1
    return {name: steps - times for name, times in held.items() if times}


@functools.cache
def plain_with_held(world_size, which):
    case, pattern, steps, precision, config = HELD[which]
    plain = Plain(world_size, precision, case=case, **config.get("optimizer", {}))
    norms = []
    for step in range(steps):
        plain.backward(step)
        held = pattern(step, list(plain.named))
        for name in held:
            plain.named[name].grad = None
        limit = config.get("gradient_clipping", float("inf"))
        norms.append(float(nn.utils.clip_grad_norm_(plain.named.values(), limit)))
        plain.step(held)
    return plain.state() | {"norms": norms}


def holding(rank, place, which):
    """Hold parameters as torch.optim.AdamW does where `.grad` is None: no moment, no decay, no step of their own."""
    case, pattern, steps, precision, config = HELD[which]
    engine = start(rank, place, case=case, precision=precision, **config)
    names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    before = engine.full_state() if which == "dino" else None
    norms = []
    for step in range(steps):
        backward(engine, rank, step, case=case)
        modifier = ("all", last(rank), 0)[step % 3]
        held = pattern(step, names)
        with engine.gradients(modifier_rank=modifier) as grads:
            if modifier in ("all", rank.rank):
                for name in held:
                    grads[name] = None
                    assert grads[name] is None
        engine.step()
        norms.append(engine.get_global_grad_norm())
        if before is not None and step == 29:
            after = engine.full_state()
            for kind in ("parameters", "exp_avg", "exp_avg_sq"):
                for name in named_by(("outlet",), names):
                    assert torch.equal(after[kind][name], before[kind][name]), (kind, name)
            assert after["parameter_steps"] == counts_of(pattern, names, 30)
    assert engine.full_state()["parameter_steps"] == counts_of(pattern, names, steps)
    assert engine.global_steps == steps
    found = end(engine)
    expected = plain_with_held(rank.world_size, which)
    expect_close(found, expected, precision)
    assert norms == pytest.approx(expected["norms"], rel=10 * TOLERANCES[precision][0])
    expect_same_everywhere(("held", which, rank.world_size), place, (found["digest"], norms))
    return found["digest"]


def overflowing_while_held(rank, place):
    """Count no held step where a step is skipped."""
    engine = start(
        rank, place, precision="fp16", loss_scale={"initial_scale": 2.0**30, "backoff_factor": 2.0**-12}
    )
    applied = []
    for step in range(5):
        backward(engine, rank, step)
        with engine.gradients() as grads:
            grads[NAME] = None
        engine.step()
        applied.append(engine.was_step_applied())
    assert not applied[0] and applied[-1]
    state = engine.full_state()
    assert state["step"] == sum(applied) and state["parameter_steps"] == {NAME: 0}
    assert not state["exp_avg"][NAME].any()
    engine.close()
    return applied


def step_held(engine, rank, step, pattern, names):
    backward(engine, rank, step)
    with engine.gradients() as grads:
        for name in pattern(step, names):
            grads[name] = None
    engine.step()


def resuming_held(rank, place, other):
    """Go on in another place from a state with held parameters as if nothing had stopped; old states load."""
    names = list(dict(zoo.make(CASE).named_parameters()))
    engine = start(rank, place)
    for step in range(5):
        step_held(engine, rank, step, hold_at_random, names)
    state = engine.full_state()
    assert state["parameter_steps"] == counts_of(hold_at_random, names, 5)
    for step in range(5, 9):
        step_held(engine, rank, step, hold_at_random, names)
    expected = end(engine)["digest"]
    engine = start(rank, other)
    train(engine, rank, range(20, 22))  # another training, which the state ends
    engine.load_full_state(**state)
    assert engine.full_state()["parameter_steps"] == state["parameter_steps"]
    for step in range(5, 9):
        step_held(engine, rank, step, hold_at_random, names)
    assert engine.full_state()["parameter_steps"] == counts_of(hold_at_random, names, 9)
    for wrong, words in (
        ({"elsewhere": 1}, "'elsewhere'"),
        ({NAME: 6}, "from 0 to 5"),
        ({NAME: -1}, "from 0 to 5"),
        ({NAME: 1.5}, "1.5"),
        ([1], "list"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.load_full_state(**state | {"parameter_steps": wrong})
    digest = zoo.state_of(engine)["digest"]
    old = {key: value for key, value in state.items() if key != "parameter_steps"}
    engine.load_full_state(**old)
    assert engine.full_state()["parameter_steps"] == {}
    train(engine, rank, [5])
    engine.load_full_state(**state)
    for step in range(5, 9):
        step_held(engine, rank, step, hold_at_random, names)
    assert zoo.state_of(engine)["digest"] == digest
    assert end(engine)["digest"] == expected
    return digest


KIND_3 = [
    *((reading_gradients, (place, "fp32", 1)) for place in PLACES),
    *((reading_gradients, (place, "fp32", 2)) for place in PLACES),
    *(
        (reading_gradients, (place, "bf16", 1))
        for place in ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme")
    ),
    *((reading_gradients, (place, "bf16", 2)) for place in ("1", "3", "2 host")),
    *((reading_gradients, (place, "fp16", 1)) for place in ("0", "2", "3", "3 host")),
    *((only_reading, (place,)) for place in PLACES),
    *((misusing_gradients, (place,)) for place in PLACES),
    *((in_backward, (place,)) for place in PLACES),
    *((changing_gradients, (place, "fp32")) for place in PLACES),
    *(
        (changing_gradients, (place, "bf16"))
        for place in ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme")
    ),
    *((changing_differently, (place,)) for place in PLACES),
    *((holding, (place, which)) for which in ("dino", "odd sizes and groups") for place in PLACES),
    *((holding, (place, "dino bf16")) for place in ("0", "1", "2", "3", "2 host", "3 all host")),
    *((holding, (place, "dino fp16")) for place in ("0", "3", "1 host")),
    *((holding, (place, "L2")) for place in ("0", "2", "3", "3 host")),
    *((holding, (place, "tied")) for place in ("0", "1", "3", "2 nvme")),
    *((holding, (place, "nearly all")) for place in ("0", "2", "3", "1 host", "3 all host")),
    *((holding, (place, "clipped")) for place in ("0", "2", "3", "1 host", "3 nvme")),
    *((overflowing_while_held, (place,)) for place in ("0", "2", "3", "2 host", "3 all host")),
    *(
        (resuming_held, (place, other))
        for place, other in (
            ("0", "3"),
            ("1", "2"),
            ("3", "1"),
            ("2", "0"),
            ("3 host", "2"),
            ("2", "3 all host"),
        )
    ),
]


# --- 4. Recipes -----------------------------------------------------------------------------------------------------


def flat_of(grads):
    return torch.cat([grads[name].flatten() for name in sorted(grads)])


def projected_sum(first, second):
    """Return the sum of two gradients, each without what contradicts the other (PCGrad)."""
    one, two = flat_of(first), flat_of(second)
    dot = one @ two
    found = {}
    for name in first:
        found[name] = first[name] + second[name]
        if dot < 0:
            found[name] = found[name] - (dot / (two @ two)) * second[name] - (dot / (one @ one)) * first[name]
    return found


def other_task(batch):
    return {**batch, "y": 0.3 - batch["y"]}


def add_noise(grads, step):
    generator = torch.Generator().manual_seed(step)
    for name in sorted(grads):
        grads[name].add_(torch.randn(grads[name].shape, generator=generator), alpha=0.01)


def clip_values(grads, step):
    for name in grads:
        grads[name].clamp_(-0.02, 0.02)


def centralise(grads, step):
    for name in grads:
        if grads[name].dim() > 1:
            grads[name] -= grads[name].mean(dim=1, keepdim=True)


def clip_each(grads, step):
    """Clip every parameter's gradient by its own norm."""
    for name in grads:
        grads[name] = grads[name] * min(1.0, 0.05 / (grads[name].norm().item() + 1e-6))


REWRITES = {
    "noise": add_noise,
    "value clipping": clip_values,
    "centralised": centralise,
    "clipped each": clip_each,
}
MAX_NORM = 0.05
RECIPES = ("pcgrad", "clip before the step", "noise, then clip", *REWRITES)


@functools.cache
def plain_recipe(world_size, precision, recipe, steps):
    plain = Plain(world_size, precision)
    norms = []
    for step in range(steps):
        plain.backward(step)
        grads = plain.gradients()
        if recipe == "pcgrad":
            plain.backward(step, change=other_task)
            grads = projected_sum(grads, plain.gradients())
        elif recipe in REWRITES:
            REWRITES[recipe](grads, step)
        elif recipe == "noise, then clip":
            add_noise(grads, step)
        for name, parameter in plain.named.items():
            parameter.grad = grads[name]
        limit = MAX_NORM if "clip " in f"{recipe} " and recipe not in REWRITES else float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(plain.named.values(), limit)))
        plain.step()
    return plain.state() | {"norms": norms}


def follow_recipe(engine, rank, recipe, step, modifier):
    """Train a step by the recipe, and return the norm of the gradients that it wrote, before clipping."""
    batch = CASE.batch(step, rank.rank, 0)
    if recipe == "pcgrad":
        first_loss, second_loss = engine(**batch), None
        if step % 2:  # both forwards first
            second_loss = engine(**other_task(batch))
        engine.backward(first_loss)
        with engine.gradients(modifier_rank=None) as grads:
            first = {name: grad.clone() for name, grad in grads.items()}
        engine.drop_gradients()
        engine.backward(engine(**other_task(batch)) if second_loss is None else second_loss)
        with engine.gradients(modifier_rank=modifier) as grads:
            for name, grad in projected_sum(first, grads).items():
                grads[name] = grad
        return engine.grad_norm()
    engine.backward(engine(**batch))
    rewrite = add_noise if recipe == "noise, then clip" else REWRITES.get(recipe)
    if rewrite is not None:
        with engine.gradients(modifier_rank=modifier) as grads:
            rewrite(grads, step)
    if "clip" not in recipe.split():
        return engine.grad_norm()
    norm = engine.clip_grad_norm_(MAX_NORM)
    assert isinstance(norm, torch.Tensor) and norm.dtype == torch.float32 and norm.shape == ()
    after = min(norm.item(), MAX_NORM)
    assert engine.grad_norm() == pytest.approx(after, rel=1e-4)
    if step == 1:  # nothing more to clip
        assert engine.clip_grad_norm_(1e6).item() == pytest.approx(after, rel=1e-4)
        assert engine.clip_grad_norm_(float("inf")).item() == pytest.approx(after, rel=1e-4)
    if step == 2:  # what a script reads is clipped
        with engine.gradients(modifier_rank=None) as grads:
            assert flat_of(grads).norm().item() == pytest.approx(after, rel=1e-4)
    return norm.item()


def recipes(rank, place, precision, recipe):
    """Train as plain PyTorch does by a recipe that rewrites gradients, with the same bits everywhere."""
    steps = 4
    expected = plain_recipe(rank.world_size, precision, recipe, steps)
    is_alike = recipe in ("clip before the step",) or rank.world_size == 1
    ends = []
    for modifier in ("all",) if is_alike else ("all", last(rank)):
        engine = start(rank, place, precision=precision)
        norms = []
        for step in range(steps):
            norms.append(follow_recipe(engine, rank, recipe, step, modifier))
            engine.step()
        found = end(engine)
        expect_close(found, expected, precision)
        assert norms == pytest.approx(expected["norms"], rel=10 * TOLERANCES[precision][0])
        ends.append((found["digest"], norms))
    assert len(set(map(repr, ends))) == 1
    expect_same_everywhere(("recipe", recipe, precision, rank.world_size), place, ends[0])
    return ends[0]


def clipping_twice(rank, place):
    """Clip by gradient_clipping what the script's own clipping left."""
    ends = []
    for own in (10 * MAX_NORM, MAX_NORM / 10):
        engine = start(rank, place, gradient_clipping=MAX_NORM)
        for step in range(3):
            backward(engine, rank, step)
            before = engine.clip_grad_norm_(own).item()
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(min(before, own), rel=1e-4)
        ends.append(end(engine))
    plain = Plain(rank.world_size)
    for step in range(3):
        plain.backward(step)
        nn.utils.clip_grad_norm_(plain.named.values(), MAX_NORM / 10)
        plain.step()
    expect_close(ends[1], plain.state())
    return [found["digest"] for found in ends]


KIND_4 = [
    *((recipes, (place, "fp32", recipe)) for recipe in RECIPES for place in PLACES),
    *((recipes, (place, "bf16", recipe)) for recipe in RECIPES[:3] for place in ("0", "2", "3", "2 host")),
    *((recipes, (place, "fp16", "pcgrad")) for place in ("1", "3")),
    *((clipping_twice, (place,)) for place in ("0", "2", "3", "1 host", "3 nvme")),
]


# --- 5. Short windows -----------------------------------------------------------------------------------------------


WINDOWS = (4, 1, 4, 2, 3)
ENDS = {
    "end_window": lambda engine: None,
    "boundary": lambda engine: engine.set_gradient_accumulation_boundary(True),
}


def short_windows(rank, place, precision, how):
    """Average over the micro-batches that there were, where a window ends before its time."""
    engine = start(rank, place, precision=precision, gradient_accumulation_steps=4)
    for step, num in enumerate(WINDOWS):
        engine.step(end_window=True)  # nothing to do
        assert engine.global_steps == step
        for micro in range(num):
            if micro == num - 1 and how == "boundary":
                engine.set_gradient_accumulation_boundary(True)
            assert engine.is_gradient_accumulation_boundary() == (
                micro == 3 or (how == "boundary" and micro == num - 1)
            )
            backward(engine, rank, step, micros=[micro])
            if micro < num - 1:
                engine.step()  # nothing to do
        engine.step(end_window=how == "end_window")
        engine.set_gradient_accumulation_boundary(None)
        assert engine.global_steps == step + 1
    found = end(engine)
    expect_close(found, plainly(rank.world_size, precision, micros=WINDOWS), precision)
    expect_same_everywhere(
        ("short", precision, rank.world_size, PLACES[place]["stage"] > 1), place, found["digest"]
    )
    return found["digest"]


def windows_of_one(rank, place, how):
    """End with the bits of a window of one micro-batch where one of four ends a window."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    for step in range(2):
        ENDS[how](engine)
        backward(engine, rank, step)
        with engine.gradients(None) if how == "boundary" else contextlib.nullcontext():
            pass
        engine.step(end_window=how == "end_window")
    assert end(engine)["digest"] == untouched(rank, place)


def long_windows(rank, place):
    """Raise StateError for a window longer than gradient_accumulation_steps, and for a boundary that is no bool."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    backward(engine, rank, 0)
    engine.step()
    with pytest.raises(StateError, match="more than 2 micro-batches"):
        backward(engine, rank, 0, micros=[1])
    engine.set_gradient_accumulation_boundary(None)
    backward(engine, rank, 0, micros=[1])
    with pytest.raises(StateError, match="more than 2 times without a step"):
        backward(engine, rank, 0, micros=[2])
    for wrong in (1, 0, "true", torch.tensor(True)):
        with pytest.raises(ConfigError, match="is_boundary"):
            engine.set_gradient_accumulation_boundary(wrong)
    engine.step()
    train(engine, rank, [1], micros=2)
    assert end(engine)["digest"] == untouched(rank, place, micros=2)


def ranks_of_other_lengths(rank, place, how):
    """Raise CommunicationError on every rank where windows end after different numbers of micro-batches."""
    if rank.world_size == 1:
        return
    # At stage 3 the longer window's forward waits for the other rank until time is over.
    engine = start(
        rank, place, gradient_accumulation_steps=4, timeout_s=1.0 if PLACES[place]["stage"] == 3 else 5.0
    )
    num = 1 if rank.rank == 0 else 2
    with pytest.raises(CommunicationError) as raised:
        backward(engine, rank, 0, micros=range(num - 1))
        ENDS[how](engine)
        backward(engine, rank, 0, micros=[num - 1])
        engine.step(end_window=how == "end_window")
        engine.get_global_grad_norm()
    if how == "end_window" and PLACES[place]["stage"] < 2:  # others reduce before the step finds out
        assert "backwards" in str(raised.value)
    engine.close()


def pending_windows(rank, place):
    """Raise StateError in full_state() while micro-batches wait for a step, and warn in close() with their number."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    for num in (1, 3):
        backward(engine, rank, 0, micros=range(num))
        with pytest.raises(StateError, match=rf"gradients of {num} micro-batch.*end_window=True"):
            engine.full_state()
        with pytest.raises(StateError, match=r"end_window=True"):
            engine.full_state(rank0_only=True)
        engine.step(end_window=True)
        assert engine.full_state()["step"] == engine.global_steps
    backward(engine, rank, 1, micros=range(2))
    engine.module.zero_grad()
    engine.full_state()
    backward(engine, rank, 1, micros=range(2))
    with noticed() as texts:
        engine.close()
    assert ["gradients of 2 micro-batches" in text for text in texts] == [True]
    with noticed() as texts:
        engine.close()
        other = start(rank, place, gradient_accumulation_steps=2)
        backward(other, rank, 0)
        other.zero_grad()
        other.close()
    assert not texts


def closing_after_a_drop(rank, place, how):
    """Close without a warning where the script has dropped the window, by whichever call."""
    engine = start(rank, place, gradient_accumulation_steps=2)
    backward(engine, rank, 0)
    DROPS[how](engine)
    with noticed() as texts:
        engine.close()
    assert not texts


def windows_before_a_failure(rank, place):
    """End a window of what is left after an exception in a backward dropped its first micro-batches."""
    engine = start(rank, place, gradient_accumulation_steps=4)
    backward(engine, rank, 7, micros=range(2))
    loss = engine(**CASE.batch(0, rank.rank, 0))
    loss.register_hook(lambda _: (_ for _ in ()).throw(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    assert all(p.grad is None for p in engine.module.parameters())
    for step in range(2):
        backward(engine, rank, step, micros=range(3))
        engine.step(end_window=True)
    expect_close(end(engine), plainly(rank.world_size, micros=(3, 3)))


KIND_5 = [
    *((short_windows, (place, "fp32", how)) for how in ENDS for place in PLACES),
    *(
        (short_windows, (place, "bf16", "end_window"))
        for place in ("0", "1", "2", "3", "2 host", "3 all host")
    ),
    *((short_windows, (place, "fp16", how)) for how in ENDS for place in ("1", "3")),
    *((windows_of_one, (place, how)) for how in ENDS for place in PLACES),
    *((long_windows, (place,)) for place in PLACES),
    *(
        (ranks_of_other_lengths, (place, how))
        for how in ENDS
        for place in ("0", "1", "2", "1 host", "2 host")
    ),
    *((ranks_of_other_lengths, (place, "end_window")) for place in ("3", "3 all host")),
    *((pending_windows, (place,)) for place in PLACES),
    *((closing_after_a_drop, (place, how)) for how in DROPS for place in ("0", "3")),
    *((windows_before_a_failure, (place,)) for place in PLACES),
]


# --- 6. Parameters --------------------------------------------------------------------------------------------------


def is_sharded(rank, place):
    """Return whether a script cannot reach parameters between uses."""
    return "3 all" in place or place == "3 nvme" or (PLACES[place]["stage"] == 3 and rank.world_size > 1)


@torch.no_grad()
def add_to_all(model):
    for parameter in model.parameters():
        parameter.add_(1.0)


@torch.no_grad()
def set_one_element(model):
    model.get_parameter(NAME)[3, 5] = 3.0


@torch.no_grad()
def copy_in(model):
    model.outlet.bias.copy_(torch.ones(3))


def zero_data(model):
    model.get_parameter(NAME).data.zero_()


def clamp_data(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def initialise(model):
    nn.init.zeros_(model.blocks[0].down.weight)


IN_PLACE = {"one element": set_one_element, "copy": copy_in, "init": initialise}
BY_DATA = {"data zeroed": zero_data}


def gathering_changes(rank, place, precision):
    """Raise at the end of a gather without modifier_rank for a change inside, and keep what one rank made."""
    engine = start(rank, place, precision=precision)
    model = engine.module
    watches_data = is_sharded(rank, place) or keeps_masters_apart(place, precision)
    for step, (how, change) in enumerate({**IN_PLACE, **(BY_DATA if watches_data else {})}.items()):
        train(engine, rank, [step])
        before = engine.full_parameters()
        with pytest.raises(StateError, match=r"pass modifier_rank to engine\.gather"):
            with engine.gather():
                change(model)
            pytest.fail(f"{how} went unnoticed")
        if is_sharded(rank, place):
            after = engine.full_parameters()
            assert all(torch.equal(after[name], before[name]) for name in before), how
        with engine.gather(model.blocks[2]):  # has nothing to do with it
            pass
        with engine.gather(modifier_rank=0):  # the cure that the error names
            pass
    train(engine, rank, [20])
    for change in (*IN_PLACE.values(), *BY_DATA.values(), add_to_all, clamp_data):
        before = engine.full_parameters()
        with engine.gather(modifier_rank=last(rank)):
            if rank.rank == last(rank):
                change(model)
            expected = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        after = engine.full_parameters()
        if rank.rank == last(rank):
            for name in expected:
                has_changed = not torch.equal(expected[name], before[name].to(DTYPES[precision]).float())
                assert torch.equal(after[name], expected[name] if has_changed else before[name]) or (
                    zoo.relative({name: after[name]}, {name: expected[name]}) < 0.01 and precision != "fp32"
                ), name
        with engine.gather():
            assert all(
                torch.equal(p, after[name].to(DTYPES[precision])) for name, p in model.named_parameters()
            )
    train(engine, rank, [21])
    return zoo.digest(end(engine)["parameters"])


def curing_many(rank, place, precision, how):
    """Settle the changes of many parameters by one gather, as the error says that names the first of them."""
    engine = start(rank, place, precision=precision)
    change = {"in place": add_to_all, "data": clamp_data}[how]
    if how == "data" and not (is_sharded(rank, place) or keeps_masters_apart(place, precision)):
        return
    for step in range(2):
        train(engine, rank, [step])
        before = engine.full_parameters()
        with pytest.raises(StateError, match=r"pass modifier_rank to engine\.gather"), engine.gather():
            change(engine.module)
        with engine.gather(modifier_rank=0):
            found = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
        after = engine.full_parameters()
        assert all(zoo.relative({0: after[name]}, {0: found[name]}) < 1e-2 for name in after)
        kept = [torch.equal(after[name], before[name]) for name in after]
        assert all(kept) == is_sharded(rank, place)  # some parameters may lie within what they are clamped to
    train(engine, rank, [2, 3])
    engine.close()


def changing_before_a_gather(rank, place, precision):
    """Raise when a gather begins for a change that was made in place before it, at every step."""
    if is_sharded(rank, place):
        return
    for change in IN_PLACE.values():
        engine = start(rank, place, precision=precision)
        train(engine, rank, range(5))  # beyond those steps that are always looked at
        with torch.no_grad():
            engine(**CASE.batch(0, rank.rank, 0))  # updates have arrived
        change(engine.module)
        with pytest.raises(StateError, match="was changed"), engine.gather(modifier_rank=0):
            pass
        engine.close()


def clamping_data(rank, place, precision):
    """Clamp parameters through `.data` after each step, as WGAN does: right as in plain PyTorch, or an error."""
    engine = start(rank, place, precision=precision)
    model = engine.module
    if is_sharded(rank, place) or keeps_masters_apart(place, precision):
        with pytest.raises((StateError, RuntimeError), match=r"engine\.gather\("):
            for step in range(4):
                train(engine, rank, [step])
                if step == 0 and not is_sharded(rank, place):
                    with torch.no_grad():
                        engine(**CASE.batch(0, rank.rank, 0))  # so that parameters can be read
                clamp_data(model)
        engine.close()
        return None
    plain = Plain(rank.world_size)
    for step in range(5):
        train(engine, rank, [step])
        clamp_data(model)
        plain.backward(step)
        plain.step()
        for parameter in (*plain.masters.parameters(), *plain.model.parameters()):
            parameter.data.clamp_(-0.01, 0.01)
    assert all((value.abs() <= 0.01).all() for value in engine.full_parameters().values())
    found = end(engine)
    expect_close(found, plain.state())
    expect_same_everywhere(("clamped", rank.world_size), place, found["digest"])
    return found["digest"]


def clamping_once_updates_arrived(rank, place, precision, name):
    """Raise StateError on every rank within three steps for a change through `.data` that the engine would undo."""
    if is_sharded(rank, place) or not keeps_masters_apart(place, precision):
        return
    engine = start(rank, place, precision=precision, overlap_updates=False, timeout_s=5.0)
    with pytest.raises(StateError, match=rf"'{name}' was changed through its \.data.*modifier_rank=0"):
        for step in range(4):
            train(engine, rank, [step])
            engine.module.get_parameter(name).data.clamp_(-1e-3, 1e-3)
    engine.close()


def scaling_data(rank, place):
    """Keep what every rank makes of parameters through `.data` right after step(), where they are the masters."""
    if PLACES[place]["stage"] == 3 or keeps_masters_apart(place):
        return None
    engine = start(rank, place)
    for step in range(60):  # a peer that still reads what the step made would see it changed now and then
        train(engine, rank, [step])
        for parameter in engine.module.parameters():
            parameter.data.mul_(0.99)
    own = zoo.digest({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    engine.close()  # before anything is compared: ranks that have drifted apart must not wait for each other
    found = {name: p.detach() for name, p in engine.module.named_parameters()}
    plain = Plain(rank.world_size)
    for step in range(60):
        plain.backward(step)
        plain.step()
        for parameter in plain.masters.parameters():
            parameter.data.mul_(0.99)
        plain.publish()
    distance = zoo.relative(found, plain.state()["parameters"])
    assert distance <= TOLERANCES["fp32"][2], distance  # of the updates: each step shrinks what came before
    expect_same_everywhere(("scaled", rank.world_size), place, own)
    return own


def changing_frozen(rank, place, precision):
    """Keep what a script merges into frozen parameters at stages 0 to 2, as PEFT does, and take it back."""
    if PLACES[place]["stage"] == 3:
        return
    case = zoo.CASES["lora"]
    engine = start(rank, place, case=case, precision=precision)
    model = engine.module
    for step in range(4):
        train(engine, rank, [step], case=case)
        with engine.gather(), torch.no_grad():
            deltas = [block.b.weight @ block.a.weight for block in model.blocks]
            for block, delta in zip(model.blocks, deltas, strict=True):
                block.base.weight.data += delta
        merged = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
        with torch.no_grad():
            engine(**case.batch(step, rank.rank, 0))
        if step < 3:
            with torch.no_grad():
                for block, delta in zip(model.blocks, deltas, strict=True):
                    block.base.weight -= delta
    served = engine.state_dict()
    assert all(torch.equal(served[name], value) for name, value in merged.items())
    full = engine.full_parameters()
    assert all(torch.equal(full[name], value.float()) for name, value in merged.items())
    train(engine, rank, [4], case=case)
    engine.close()


READS = {
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "to float64": lambda p: p.detach().to(torch.float64),
    "lerp": lambda p: torch.zeros(p.shape, dtype=p.dtype).lerp_(p.detach(), 1.0),
    "stack": lambda p: torch.stack([p.detach()])[0],
    "copy": lambda p: torch.empty(p.shape, dtype=p.dtype).copy_(p.detach()),
    "multiply": lambda p: p * 1.0,
}


def averaging(rank, place, precision, overlap):
    """Read parameters that a script holds from before initialize right after step(): right values or an error."""
    model = zoo.make(CASE)
    held = dict(model.named_parameters())
    engine = start(rank, place, model=model, precision=precision, overlap_updates=overlap)
    must_read = not overlap and PLACES[place]["stage"] < 3
    for step in range(3):
        train(engine, rank, [step])
        assert sum(p.numel() for p in engine.parameters() if p.requires_grad) == sum(
            p.shape.numel() for p in model.parameters()
        )
        assert all(p.dtype == DTYPES[precision] and p.is_contiguous() for _, p in engine.named_parameters())
        found, refused = {}, 0
        for how, read in READS.items():
            for name, parameter in held.items():
                try:
                    found[how, name] = read(parameter).detach().clone()
                except RuntimeError as error:
                    assert "engine.gather()" in str(error), (how, name, error)
                    refused += 1
        assert not (must_read and refused), (step, refused)
        expected = engine.full_parameters()
        wrong = [
            key
            for key, value in found.items()
            if not torch.equal(value.to(DTYPES[precision]), expected[key[1]].to(DTYPES[precision]))
        ]
        assert not wrong, f"stale right after step {step + 1}: {wrong[:3]}, {len(wrong)} in all"
    # When they can be read.
    if not is_sharded(rank, place):
        with torch.no_grad():
            engine(**CASE.batch(0, rank.rank, 0))
        assert all(torch.equal(p, expected[name].to(DTYPES[precision])) for name, p in held.items())
        train(engine, rank, [3])
        served = engine.state_dict()
        assert all(torch.equal(p, served[name]) for name, p in held.items())
        train(engine, rank, [4])
    with engine.gather():
        read = {name: p.detach().clone() for name, p in held.items()}
    expected = engine.full_parameters()
    assert all(torch.equal(p, expected[name].to(DTYPES[precision])) for name, p in read.items())
    digest = end(engine)["digest"]
    expect_same_everywhere(("read", precision, rank.world_size, is_sharded(rank, place)), place, digest)
    return digest


KIND_6 = [
    *((gathering_changes, (place, "fp32")) for place in PLACES),
    *(
        (gathering_changes, (place, "bf16"))
        for place in ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme")
    ),
    *((curing_many, (place, "fp32", how)) for how in ("in place", "data") for place in PLACES),
    *((curing_many, (place, "bf16", how)) for how in ("in place", "data") for place in ("0", "2", "3")),
    *((changing_before_a_gather, (place, "fp32")) for place in PLACES),
    *((changing_before_a_gather, (place, "bf16")) for place in ("0", "2", "1 host")),
    *((clamping_data, (place, "fp32")) for place in PLACES),
    *((clamping_data, (place, "bf16")) for place in ("0", "1", "2", "3", "2 host", "3 all host")),
    *((clamping_once_updates_arrived, (place, "fp32", NAME)) for place in PLACES),
    *(
        (clamping_once_updates_arrived, (place, "bf16", name))
        for name in (NAME, "inlet.bias", "outlet.weight")
        for place in ("0", "1", "2", "3", "2 host")
    ),
    *((scaling_data, (place,)) for place in ("0", "1", "2")),
    *((changing_frozen, (place, precision)) for precision in ("fp32", "bf16") for place in PLACES),
    *((averaging, (place, "fp32", overlap)) for overlap in (True, False) for place in PLACES),
    *(
        (averaging, (place, "bf16", overlap))
        for overlap in (True, False)
        for place in ("0", "1", "2", "3", "2 host")
    ),
]


# --- 7. optimizer.state ---------------------------------------------------------------------------------------------


def optimizer_state(rank, place):
    """Serve a mapping of every trained parameter that cannot be read or written, and let torch's own functions be."""
    from torch.distributed.checkpoint import state_dict as torch_state

    engine = start(rank, place, case=zoo.CASES["frozen"])
    case = zoo.CASES["frozen"]
    model, optimizer = engine.module, engine.optimizer
    for step in range(2):
        train(engine, rank, [step], case=case)
        state = optimizer.state
        assert isinstance(state, Mapping) and state and len(state) == len(list(state)) > 0
        assert all(any(p is key for key in state) for p in model.parameters() if p.requires_grad)
        for read in (
            lambda state=state: state[next(iter(state))],
            lambda state=state: dict(state),
            lambda state=state: list(state.values()),
        ):
            with pytest.raises(StateError, match=r"engine\.full_state\(\)"):
                read()
        with pytest.raises(TypeError):
            state[next(iter(state))] = {}
        with pytest.raises(TypeError):
            del state[next(iter(state))]
        rates = [group["lr"] for group in optimizer.param_groups]
        for call in (
            lambda: torch_state.get_optimizer_state_dict(model, optimizer),
            lambda: torch_state.get_state_dict(model, optimizer),
            lambda: torch_state.set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
            optimizer.state_dict,
        ):
            with pytest.raises(Exception) as raised:
                call()
            assert (
                isinstance(raised.value, StateError)
                or "engine.gather" in str(raised.value)
                or ("engine.state_dict" in str(raised.value))
            ), repr(raised.value)
            assert [group["lr"] for group in optimizer.param_groups] == rates
            assert engine.global_steps == step + 1
        with pytest.raises(StateError, match=r"engine\.full_state\(\)"):
            torch_state.get_optimizer_state_dict(model, optimizer)
    train(engine, rank, [2], case=case)
    digest = end(engine)["digest"]
    engine = start(rank, place, case=case)
    train(engine, rank, range(3), case=case)
    assert end(engine)["digest"] == digest
    return digest


KIND_7 = [(optimizer_state, (place,)) for place in PLACES]


# --- 8. Compiled blocks ---------------------------------------------------------------------------------------------


def compiled_blocks(rank, place, backend):
    """Compile blocks in the first micro-batch, and nothing in the rest of the window and in the next one."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = zoo.make(CASE)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter)
    engine = start(rank, place, model=model, gradient_accumulation_steps=4)
    backward(engine, rank, 0)
    compiled = counter.frame_count
    assert compiled >= 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        backward(engine, rank, 0, micros=range(1, 4))
        with engine.gradients(None):
            pass
        engine.step()
        backward(engine, rank, 1, micros=range(2))
        engine.zero_grad()
        train(engine, rank, [1], micros=4)
    assert counter.frame_count == compiled
    found = end(engine)
    expect_close(found, plainly(rank.world_size, micros=(4, 4)))


KIND_8 = [(compiled_blocks, (place, "aot_eager")) for place in ("0", "1", "2", "3", "2 host", "3 all host")]


KINDS = {
    "grad": KIND_1,
    "drop": KIND_2,
    "gradients": KIND_3,
    "recipes": KIND_4,
    "windows": KIND_5,
    "parameters": KIND_6,
    "state": KIND_7,
    "compiled": KIND_8,
}
# Every place and every precision has its turn; all of them on every number of ranks would take minutes.
PLACES_OF = {
    1: ("0", "2", "3", "3 host", "2 nvme"),
    2: ("0", "1", "2", "3", "2 host", "3 all host", "3 nvme"),
    3: ("1", "2", "3", "1 host"),
}


ON_TWO_PLACES = (
    touching_gradients,
    frozen_have_none,
    dropping_nothing,
    dropping_before_each,
    dropping_inside,
    misusing_gradients,
    only_reading,
    in_backward,
    long_windows,
    pending_windows,
    compiled_blocks,
)
SWAPPED = (
    touching_gradients,
    dropping,
    reading_gradients,
    changing_gradients,
    holding,
    recipes,
    short_windows,
    gathering_changes,
    averaging,
)


def is_run(world_size, check, place, *arguments):
    """Return whether a check runs in this place on so many ranks."""
    if check is resuming_held:
        return world_size == 2 or place in ("0", "3")
    if world_size == 1 and check in (changing_differently, ranks_disagree, ranks_of_other_lengths):
        return False
    is_low = any(each in ("bf16", "fp16", "dino bf16", "dino fp16") for each in arguments)
    if is_low:
        return place in (("0", "1", "3", "2 host") if world_size == 2 else ("3",))
    if place == "3 nvme":  # slow, and the swap files' own tests train every kind of model
        return world_size == 2 and check in SWAPPED
    if world_size == 3 and check in (recipes, holding):
        return place in ("2", "3") or (place == "1 host" and arguments[-1] in ("pcgrad", "dino"))
    if world_size == 3 and check in ON_TWO_PLACES:
        return place in ("3", "1 host")
    if check is recipes and arguments[-1] in REWRITES and place in ("1", "2 host"):
        return False
    return place in PLACES_OF[world_size]


CHECKS = {
    (world_size, kind): [
        (check, arguments) for check, arguments in checks if is_run(world_size, check, *arguments)
    ]
    for kind, checks in KINDS.items()
    for world_size in PLACES_OF
}
RUNS = [
    pytest.param(
        world_size, kind, index, id=f"{kind}-{check.__name__}-{'-'.join(map(str, arguments))}-{world_size}"
    )
    for (world_size, kind), checks in CHECKS.items()
    for index, (check, arguments) in enumerate(checks)
]


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory):
    """Return the function that gives the outcomes of a kind on so many ranks, by rank."""
    folder = str(tmp_path_factory.mktemp("swap"))

    @functools.cache
    def run(world_size, kind):
        return ranks.run(
            border_scripts.run_all, CHECKS[world_size, kind], folder, world_size=world_size, timeout_s=280.0
        )

    return run


@pytest.mark.parametrize(("world_size", "kind", "index"), RUNS)
def test_scripts_at_borders(outcomes_of, world_size, kind, index):
    outcomes = [of_rank[index] for of_rank in outcomes_of(world_size, kind)]
    for rank, (error, _) in enumerate(outcomes):
        assert error is None, f"rank {rank}: {error}"
    assert len({repr(value) for _, value in outcomes}) == 1, "ranks end differently"
