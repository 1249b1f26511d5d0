"""Errors in the middle of training, at every stage: one clear sentence, and training goes on as if nothing had been."""

from __future__ import annotations

import functools
import gc
import warnings

import engine_faults
import pytest
import ranks
import small_models
import torch
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerobench
from zerobench import errors

STAGES = (0, 1, 2, 3)
NAMES = ["inlet.weight", "blocks.1.up.weight"]


class Fuse(nn.Module):
    """Passes values through; its forward or backward raises while ``blown`` says so."""

    blown: str | None = None
    kind: type[BaseException] = ArithmeticError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.blown == "forward":
            raise self.kind("planted in forward")
        return BackwardFuse.apply(x, self)


class BackwardFuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fuse.blown == "backward":
            raise ctx.fuse.kind("planted in backward")
        return gradient, None


class FusedBlock(small_models.Block):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = Fuse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fuse(super().forward(x))


def fused() -> small_models.Chain:
    return small_models.Chain(3, block=FusedBlock)


CASE = zoo.Case(fused, steps=4)


training = functools.partial(engine_faults.training, case=CASE)
goes_on = functools.partial(engine_faults.goes_on, case=CASE)


def one_step(engine, rank, step, *, case=CASE) -> None:
    zoo.run_plan(engine, case, step, rank.rank, [])


def exception_in_forward(rank, stage, where):
    with training(rank, stage) as engine:
        one_step(engine, rank, 0)
        for _ in range(2):
            engine.module.blocks[where].fuse.blown = "forward"
            with (
                warnings.catch_warnings(record=True) as caught,
                pytest.raises(ArithmeticError, match="planted in forward"),
            ):
                engine(**zoo.points(1, rank.rank))
            assert not caught
            engine.module.blocks[where].fuse.blown = None
        goes_on(engine, rank, stage, done=1)


def exception_in_first_forward(rank, stage):
    with training(rank, stage) as engine:
        engine.module.blocks[1].fuse.blown = "forward"
        with pytest.raises(ArithmeticError):
            engine(**zoo.points(0, rank.rank))
        engine.module.blocks[1].fuse.blown = None
        goes_on(engine, rank, stage)


def exception_in_backward(rank, stage, where):
    with training(rank, stage) as engine:
        for step in range(2):
            loss = engine(**zoo.points(step, rank.rank))
            engine.module.blocks[where].fuse.blown = "backward"
            with pytest.raises(ArithmeticError, match="planted in backward"):
                engine.backward(loss)
            engine.module.blocks[where].fuse.blown = None
            with pytest.raises(errors.StateError, match="without gradients"):
                engine.step()
            one_step(engine, rank, step)
        goes_on(engine, rank, stage, done=2)


def exception_while_accumulating(rank, stage):
    """The window's other micro-batches are dropped, too."""
    case = zoo.Case(fused, plan="FBFBFB", steps=3, config={"gradient_accumulation_steps": 3})
    with training(rank, stage, case=case) as engine:
        engine.backward(engine(**zoo.points(50, rank.rank)))
        engine.step()
        loss = engine(**zoo.points(51, rank.rank))
        engine.module.blocks[1].fuse.blown = "backward"
        with pytest.raises(ArithmeticError):
            engine.backward(loss)
        engine.module.blocks[1].fuse.blown = None
        goes_on(engine, rank, stage, case=case)


def interrupt_in_forward(rank, stage):
    with training(rank, stage) as engine:
        engine.module.blocks[1].fuse.kind, engine.module.blocks[1].fuse.blown = KeyboardInterrupt, "forward"
        with pytest.raises(KeyboardInterrupt):
            engine(**zoo.points(0, rank.rank))
        engine.module.blocks[1].fuse.blown = None
        goes_on(engine, rank, stage)


def interrupt_in_a_method(rank, stage):
    """Interrupt a method of the model, whose forward the engine does not call itself."""
    with training(rank, stage) as engine:
        fuse = engine.module.blocks[1].fuse
        engine.module.generate = lambda: engine.module(**zoo.points(0, rank.rank))
        for call in (engine.generate, engine.module.generate):
            fuse.kind, fuse.blown = KeyboardInterrupt, "forward"
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                call()
            fuse.blown = None
            with torch.no_grad():
                engine(**zoo.points(0, rank.rank))
        nested = engine.module.blocks[1].register_forward_pre_hook(lambda *_: engine(**zoo.points(0, 0)))
        with pytest.raises(errors.StateError, match="cannot be nested"):
            engine.module(**zoo.points(0, rank.rank))
        nested.remove()
        goes_on(engine, rank, stage)


def interrupt_in_backward(rank, stage):
    with training(rank, stage) as engine:
        loss = engine(**zoo.points(0, rank.rank))
        engine.module.blocks[1].fuse.kind, engine.module.blocks[1].fuse.blown = KeyboardInterrupt, "backward"
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        engine.module.blocks[1].fuse.blown = None
        goes_on(engine, rank, stage)


def plain_backward(rank, stage):
    with training(rank, stage) as engine:
        one_step(engine, rank, 0)
        with pytest.raises(
            (RuntimeError, errors.StateError), match=r"Call engine\.backward\(loss\), not loss\.backward"
        ):
            engine(**zoo.points(1, rank.rank)).backward()
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        # That error is forgotten: the next one is told as it is.
        engine.module.blocks[0].fuse.blown = "backward"
        with pytest.raises(ArithmeticError):
            engine.backward(engine(**zoo.points(1, rank.rank)))
        engine.module.blocks[0].fuse.blown = None
        goes_on(engine, rank, stage, done=1)


def step_without_backward(rank, stage):
    with training(rank, stage) as engine:
        with pytest.raises(errors.StateError, match=r"call engine\.backward"):
            engine.step()
        one_step(engine, rank, 0)
        with pytest.raises(errors.StateError, match=r"call engine\.backward"):
            engine.optimizer.step()
        goes_on(engine, rank, stage, done=1)


def backwards_without_a_step(rank, stage):
    with training(rank, stage) as engine:
        engine.backward(engine(**zoo.points(0, rank.rank)))
        with pytest.raises(errors.StateError, match="more than 1 times without a step"):
            engine.backward(engine(**zoo.points(0, rank.rank)))
        with engine.gather(), pytest.raises(errors.StateError, match="leave the block first"):
            engine.step()
        engine.step()
        goes_on(engine, rank, stage, done=1)


def backward_of_an_earlier_step(rank, stage):
    """Its gradients would be of activations by the old parameters and of the new ones."""
    for config in ({}, {"offload_optimizer": {"device": "cpu"}}) if stage else ({},):
        with training(rank, stage, **config) as engine:
            one_step(engine, rank, 0)
            state = engine.full_state()
            for change in (lambda: one_step(engine, rank, 1), lambda: engine.load_full_state(**state)):  # noqa: B023
                early = engine(**zoo.points(1, rank.rank))
                change()
                with pytest.raises(
                    errors.StateError, match=r"from before the last step.*call the engine again"
                ):
                    engine.backward(early)
            goes_on(engine, rank, stage, done=1, **config)


def hyperparameters_that_cannot_be(rank, stage):
    """The gradients wait for others."""
    case = zoo.Case(fused, plan="FBFB", steps=3, config={"gradient_accumulation_steps": 2})
    for in_backward in (False, True):
        config = {"optimizer_in_backward": in_backward}
        with training(rank, stage, case=case, **config) as engine:
            group = engine.optimizer.param_groups[0]
            for micro in range(2):
                loss = engine(**zoo.points(0, rank.rank, micro))
                group["lr"] = -1.0 if micro and in_backward else zoo.LR
                if micro and in_backward:
                    with pytest.raises(errors.ConfigError, match=r"param group 0 has lr -1\.0"):
                        engine.backward(loss)
                    group["lr"] = zoo.LR
                engine.backward(loss)
            for key, value in (
                () if in_backward else (("lr", float("nan")), ("betas", (0.9, 1.0)), ("eps", -1.0))
            ):
                right = group[key]
                group[key] = value
                with pytest.raises(errors.ConfigError, match=r"engine\.optimizer\.param_groups and repeat"):
                    engine.step()
                group[key] = right
            if not in_backward:
                last = group["params"].pop()
                with pytest.raises(errors.StateError, match="param groups hold other parameters"):
                    engine.step()
                group["params"].append(last)
            engine.step()
            goes_on(engine, rank, stage, done=1, case=case, **config)


def backward_of_a_vector(rank, stage):
    with training(rank, stage) as engine:
        with pytest.raises(errors.StateError, match=r"not loss\.item"):
            engine.backward(1.0)
        with pytest.raises(errors.StateError, match=r"reduce it with \.mean"):
            engine.backward(torch.ones(3, requires_grad=True))
        goes_on(engine, rank, stage)


def engine_inside_its_own_forward(rank, stage):
    with training(rank, stage) as engine:
        nested = engine.module.blocks[1].register_forward_pre_hook(lambda *_: engine(**zoo.points(0, 0)))
        with pytest.raises(errors.StateError, match="cannot be nested"):
            engine(**zoo.points(0, rank.rank))
        nested.remove()
        loss = checkpoint(engine, **zoo.points(0, rank.rank), use_reentrant=False)
        with pytest.raises(errors.StateError, match="checkpoint blocks inside of it"):
            engine.backward(loss)
        goes_on(engine, rank, stage)


def replaced_storage(rank, stage):
    with training(rank, stage) as engine:
        one_step(engine, rank, 0)
        parameter = engine.module.blocks[1].up.bias
        parameter.data = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        with pytest.raises(errors.StateError, match=r"'blocks\.1\.up\.bias' was replaced from outside"):
            one_step(engine, rank, 1)


def moved_storage(rank, stage):
    """torch moves to shared memory what other processes are to see."""
    with training(rank, stage) as engine:
        one_step(engine, rank, 0)
        with engine.gather():
            engine.module.share_memory()
        if stage < 3:
            with pytest.raises(errors.StateError, match=r"'inlet\.weight' was replaced.*share_memory\(\)"):
                one_step(engine, rank, 1)
        else:  # what was moved is gone with the block
            goes_on(engine, rank, stage, done=1)


def unfrozen_after_the_start(rank, stage):
    case = zoo.Case(small_models.frozen_parts)
    with training(rank, stage, case=case) as engine:
        one_step(engine, rank, 0, case=case)
        engine.module.outlet.bias.requires_grad_(True)
        engine.backward(engine(**zoo.points(1, rank.rank)))
        with pytest.raises(errors.StateError, match=r"'outlet\.bias' was frozen when the engine was made"):
            engine.step()
        engine.module.outlet.bias.requires_grad_(False)


def used_behind_the_engine(rank, stage):
    """A unit's parameters get gradients although its module was not called: told, and right when repeated."""
    if stage == 3:
        return  # there they have no data
    with training(rank, stage) as engine:
        one_step(engine, rank, 0)
        block = engine.module.blocks[2]
        swapped = engine.module.blocks

        def step():
            engine.module.blocks = swapped[:2]
            loss = engine(**zoo.points(1, rank.rank)) + block.up.weight.square().mean()
            engine.module.blocks = swapped
            engine.backward(loss)

        with pytest.raises(errors.StateError, match=r"a further gradient of 'blocks\.2\.up\.weight'.*Repeat"):
            step()
        step()
        engine.step()
        one_step(engine, rank, 2)


def unit_called_alone(rank, stage):
    with training(rank, stage) as engine:
        x = torch.ones(2, small_models.WIDTH)
        if stage == 3:
            with (
                torch.no_grad(),
                pytest.raises(errors.StateError, match=r"'blocks\.0' was called outside a forward"),
            ):
                engine.module.blocks[0](x)
        with engine.gather(engine.module.blocks[0]), torch.no_grad():
            engine.module.blocks[0](x)
        goes_on(engine, rank, stage)


def parameters_outlive_their_engine(rank, stage):
    with training(rank, stage) as engine:
        one_step(engine, rank, 0)
        expected = engine.state_dict()["inlet.weight"]
        model = engine.module
    with pytest.raises(errors.StateError, match="closed"):
        engine.step()
    del engine
    gc.collect()
    filler = [torch.ones(64) for _ in range(2000)]  # where the engine was is something else now
    if stage == 3:
        with pytest.raises(RuntimeError, match="belonged to an engine that was closed"):
            model.inlet.weight.sum()
    else:
        assert torch.equal(model.inlet.weight, expected)
    del model, filler
    gc.collect()


def two_engines_at_once(rank, stage):
    with training(rank, stage) as first, training(rank, 3 - stage) as second:
        for step in range(2):
            one_step(first, rank, step)
            one_step(second, rank, step)
        assert zoo.state_of(first)["digest"] == zoo.state_of(second)["digest"]


def dropped_without_close(rank, stage):
    model = zoo.make(CASE)
    engine = zerobench.initialize(model, config=rank.config(stage=stage))
    engine.backward(engine(**zoo.points(0, rank.rank)))
    del engine, model
    gc.collect()


def cannot_be_trained(rank, stage):
    model = zoo.make(CASE)
    model.blocks[1].down.double()
    for needs_gradient in (True, False):
        model.blocks[1].down.requires_grad_(needs_gradient)
        with pytest.raises(errors.ConfigError, match=r"'blocks\.1\.down\.weight' is float64.*model\.float"):
            zerobench.initialize(model, config=rank.config(stage=stage))
    assert torch.equal(model.inlet.weight, zoo.make(CASE).inlet.weight)


CHECKS = [
    (exception_in_forward, (0,)),
    (exception_in_forward, (2,)),
    (exception_in_first_forward, ()),
    (exception_in_backward, (0,)),
    (exception_in_backward, (2,)),
    (exception_while_accumulating, ()),
    (interrupt_in_forward, ()),
    (interrupt_in_a_method, ()),
    (interrupt_in_backward, ()),
    (plain_backward, ()),
    (step_without_backward, ()),
    (backwards_without_a_step, ()),
    (backward_of_an_earlier_step, ()),
    (hyperparameters_that_cannot_be, ()),
    (backward_of_a_vector, ()),
    (engine_faults.not_a_number, ("fp32",)),
    (engine_faults.not_a_number, ("bf16",)),
    (engine_faults.not_a_number_in_fp16, ()),
    (engine_inside_its_own_forward, ()),
    (replaced_storage, ()),
    (moved_storage, ()),
    (unfrozen_after_the_start, ()),
    (used_behind_the_engine, ()),
    (unit_called_alone, ()),
    (parameters_outlive_their_engine, ()),
    (two_engines_at_once, ()),
    (dropped_without_close, ()),
    (cannot_be_trained, ()),
]
RUNS = [(check, (stage, *arguments)) for stage in STAGES for check, arguments in CHECKS]
LABELS = [f"{check.__name__}-{'-'.join(map(str, arguments))}" for check, arguments in RUNS]


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(ranks.run_checks, RUNS)


@pytest.mark.parametrize("index", range(len(RUNS)), ids=LABELS)
def test_goes_on_after(outcomes, index):
    for rank, errors_of_rank in enumerate(outcomes):
        assert errors_of_rank[index] is None, f"rank {rank}: {errors_of_rank[index]}"
