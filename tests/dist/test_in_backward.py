"""The optimizer in backward ends where the one in the step does, bit for bit, at every stage."""

from __future__ import annotations

import dataclasses

import pytest
import ranks
import torch
import zoo

import zerobench
from zerobench.errors import NonFiniteGradientError, StateError

STAGES = (0, 1, 2, 3)
NAMES = (
    "blocks",
    "param groups and schedule",
    "frozen",
    "tied",
    "skipped on one rank",
    "order differs",
    "experts",
    "tensors handed on",
    "handed on in tuples",
    "handed on in objects",
    "views changed in place",
    "blocks that call themselves",
    "hooks that read parameters",
    "non-reentrant",
    "bf16 reduced in fp32",
    "two forwards, two backwards",
)


OFFLOADED = ("blocks", "skipped on one rank", "bf16 reduced in fp32")


def train_offloaded(rank: ranks.Rank) -> dict:
    options = {"optimizer_in_backward": True, "offload_optimizer": {"device": "cpu"}}
    return {
        (name, stage): zoo.train_engine(zoo.CASES[name], rank, stage=stage, **options)
        for name in OFFLOADED
        for stage in STAGES[1:]
    }


def train_all(rank: ranks.Rank) -> dict:
    return zoo.train_with_and_without(rank, "optimizer_in_backward", NAMES)


@pytest.fixture(scope="module")
def results():
    return {world_size: ranks.run(train_all, world_size=world_size) for world_size in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_ends_with_the_same_bits(results, world_size, stage, name):
    for rank in results[world_size]:
        plain, in_backward = (rank[name, stage, flag] for flag in (False, True))
        assert "error" not in plain, plain["error"]
        assert "error" not in in_backward, in_backward["error"]
        for key in ("digest", "norms", "losses", "applied", "served"):
            assert repr(plain[key]) == repr(in_backward[key]), key


def test_ends_with_the_same_bits_on_the_host(results):
    for rank, found in enumerate(ranks.run(train_offloaded, world_size=2)):
        for (name, stage), record in found.items():
            plain = results[2][rank][name, stage, False]
            assert record["digest"] == plain["digest"], (name, stage)


def fail_in_many_ways(rank: ranks.Rank, stage: int) -> dict:
    case = dataclasses.replace(zoo.CASES["blocks"], config={"optimizer_in_backward": True})
    said = {}

    def make():
        return zerobench.initialize(
            zoo.make(case), config=rank.config(stage=stage, **zoo.optimizer_config(case))
        )

    engine = make()
    zoo.run_plan(engine, case, 0, rank.rank, [])
    engine.backward(engine(**case.batch(1, rank.rank, 0)))
    calls = {"forward": lambda: engine(**case.batch(2, rank.rank, 0)), "state": engine.state_dict}
    for name, call in calls.items():
        with pytest.raises(StateError) as error:
            call()
        said[name] = str(error.value)
    engine.step()
    steps = engine.global_steps
    loss = engine(**case.batch(2, rank.rank, 0))
    with pytest.raises(NonFiniteGradientError) as error:
        engine.backward(loss * float("nan"))
        engine.step()
    said["nan"] = str(error.value)
    with pytest.raises(StateError) as error:
        engine(**case.batch(3, rank.rank, 0))
    said["torn"] = str(error.value)
    engine.close()
    return {"said": said, "steps": steps}


@pytest.mark.parametrize("stage", STAGES)
def test_errors_say_what_to_do(stage):
    for found in ranks.run(fail_in_many_ways, stage, world_size=2):
        assert found["steps"] == 2
        assert "call engine.step()" in found["said"]["forward"]
        assert "call engine.step()" in found["said"]["state"]
        assert "load a state" in found["said"]["nan"]
        assert "load a state" in found["said"]["torn"]


def test_needs_no_clipping_and_no_loss_scale():
    model = torch.nn.Linear(2, 2)
    for config, word in (({"gradient_clipping": 1.0}, "gradient_clipping"), ({"precision": "fp16"}, "fp16")):
        with pytest.raises(zerobench.errors.ConfigError, match=word):
            zerobench.initialize(model, config={"optimizer_in_backward": True, **config})
