"""Published recipes that rewrite gradients, next to plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import script_runs
import torch
from script_engines import (
    CASE,
    PLACES,
    TOLERANCES,
    Plain,
    backward,
    end,
    expect_close,
    expect_same_everywhere,
    last,
    start,
)
from torch import nn


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


CHECKS = [
    *((recipes, (place, "fp32", recipe)) for recipe in RECIPES for place in PLACES),
    *((recipes, (place, "bf16", recipe)) for recipe in RECIPES[:3] for place in ("0", "2", "3", "2 host")),
    *((recipes, (place, "fp16", "pcgrad")) for place in ("1", "3")),
    *((clipping_twice, (place,)) for place in ("0", "2", "3", "1 host", "3 nvme")),
]


def is_run(world_size, check, place, *arguments):
    """Return whether a check runs in this place, or None where the usual places hold."""
    if check is recipes and world_size == 3:
        return place in ("2", "3") or (place == "1 host" and arguments[-1] == "pcgrad")
    if check is recipes and arguments[-1] in REWRITES and place in ("1", "2 host"):
        return False
    return None


RUNS = script_runs.Runs(CHECKS, swapped=(recipes,), rule=is_run)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_follow_a_recipe(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)
