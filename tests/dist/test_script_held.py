"""Scripts that hold parameters in some steps: they have no gradient then."""

from __future__ import annotations

import functools

import pytest
import script_runs
import torch
import zoo
from script_engines import (
    CASE,
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
)
from torch import nn

from zerobench.errors import ConfigError


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


CHECKS = [
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


def is_run(world_size, check, place, *arguments):
    """Return whether a check runs in this place, or None where the usual places hold."""
    if check is resuming_held:
        return world_size == 2 or place in ("0", "3")
    if check is holding and world_size == 3:
        return place in ("2", "3") or (place == "1 host" and arguments[-1] == "dino")
    return None


RUNS = script_runs.Runs(CHECKS, swapped=(holding,), rule=is_run)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_hold_parameters(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)
