"""Scripts that touch `.grad` between backward and step."""

from __future__ import annotations

import pytest
import script_runs
import torch
import zoo
from script_engines import (
    CASE,
    DTYPES,
    NAME,
    PLACES,
    backward,
    end,
    start,
    train,
    untouched,
)
from torch import nn

from zerobench.errors import StateError

NAMES_GRADIENTS = r"engine\.gradients\(\)"


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


CHECKS = [
    *((touching_gradients, (place, "fp32")) for place in PLACES),
    *((touching_gradients, (place, "bf16")) for place in PLACES),
    *((touching_gradients, (place, "fp16")) for place in ("1", "3", "2 host")),
    *((gone_while_computing, (place,)) for place in PLACES),
    *((frozen_have_none, (place,)) for place in PLACES),
    *((plain_backward, (place,)) for place in PLACES),
    *((tampering, (place, "fp32")) for place in PLACES),
    *((tampering, (place, "bf16")) for place in ("2", "3", "2 host")),
    *((tampering, (place, "fp16")) for place in ("0", "3")),
]


RUNS = script_runs.Runs(
    CHECKS,
    on_two_places=(touching_gradients, frozen_have_none),
    swapped=(touching_gradients,),
)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_touch_gradients(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)
