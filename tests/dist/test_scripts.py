"""What training scripts do besides training: loading, saving, reading between steps, changing the model."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
import small_models
import zoo

import zerobench
from zerobench.errors import ConfigError, StateError

CASE = zoo.CASES["blocks"]
HOST = {"offload_optimizer": {"device": "cpu"}}
PLACES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2 on host": {"stage": 2, **HOST},
    "3 on host": {"stage": 3, **HOST, "offload_param": {"device": "cpu"}},
}


def start(rank, place, **config):
    settings = zoo.optimizer_config(CASE) | PLACES[place] | config
    return zerobench.initialize(zoo.make(CASE), config=rank.config(**settings))


def train(engine, rank, steps, first=0):
    for step in range(first, first + steps):
        zoo.run_plan(engine, CASE, step, rank.rank, [])


def reads_by_other_ranks(rank, place):
    """Whether the last step's parameters come with the next forward, in which every rank has a part."""
    return rank.world_size > 1 and place == "2 on host"


def loading(rank, place, precision):
    """What rank 0 loads is everybody's, masters included, and stays."""
    engine = start(rank, place, precision=precision)
    train(engine, rank, 2)
    saved = engine.state_dict()
    train(engine, rank, 2, first=2)
    given = saved if rank.rank == 0 else {name: value + 1 for name, value in saved.items()}
    assert engine.load_state_dict(given).missing_keys == []
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, rank, 1, first=4)
    served = engine.state_dict()
    assert all(torch.equal(served[name], saved[name]) for name in saved)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        engine.load_state_dict(saved | {"more": torch.ones(1)})
    with pytest.raises(StateError, match=r"engine\.load_state_dict\(\)"):
        engine.module.load_state_dict(saved)
    engine.close()
    engine.module.load_state_dict(saved) if PLACES[place]["stage"] < 3 else None


def resuming(rank, place, precision):
    """full_state and load_full_state: a new engine goes on as the old one would have."""
    engine = start(rank, place, precision=precision)
    train(engine, rank, 2)
    state = pickle.loads(pickle.dumps(engine.full_state()))
    train(engine, rank, 2, first=2)
    expected = zoo.state_of(engine)["digest"]
    engine.close()
    engine = start(rank, place, precision=precision)
    engine.load_full_state(**state)
    train(engine, rank, 2, first=2)
    assert zoo.state_of(engine)["digest"] == expected
    for call in (engine.optimizer.state_dict, lambda: engine.optimizer.load_state_dict({})):
        with pytest.raises(StateError, match=r"engine\.full_state\(\)"):
            call()
    engine.close()


def reading(rank, place):
    """Between steps the model serves what the last step made of it, or says why not."""
    if PLACES[place]["stage"] == 3:
        return  # touching a parameter raises: test_gather.py
    engine = start(rank, place)
    for step in range(4):
        train(engine, rank, 1, first=step)
        if reads_by_other_ranks(rank, place):
            with pytest.raises(StateError, match=r"engine\.state_dict\(\)"):
                engine.module.state_dict()
            with engine.gather():
                seen = copy.deepcopy(dict(engine.module.state_dict()))
        elif step % 2:
            seen = copy.deepcopy(dict(engine.module.state_dict()))
        else:
            named = engine.named_parameters()  # the model's own method, by way of the engine
            seen = {name: p.detach().clone() for name, p in named}
        assert zoo.digest(seen) == zoo.digest(engine.state_dict())
    engine.close()


def computing_elsewhere(rank, place):
    """Parts of the model that compute outside of its forward."""
    if PLACES[place]["stage"] == 3:
        return
    engine = start(rank, place)
    x = torch.ones(2, small_models.WIDTH)
    for step in range(3):
        train(engine, rank, 1, first=step)
        if reads_by_other_ranks(rank, place):
            with pytest.raises(StateError, match=r"'blocks\.0' was called outside a forward.*engine\.gather"):
                engine.module.blocks[0](x)
            with engine.gather():
                seen = engine.module.blocks[0](x)
        else:
            seen = engine.blocks[0](x)
        whole = small_models.Chain()
        whole.load_state_dict(engine.state_dict())
        assert torch.equal(seen, whole.blocks[0](x))
    engine.close()


def forward_by_name(rank, place):
    """``engine.forward`` is a call of the engine."""
    results = []
    for call in (lambda engine: engine, lambda engine: engine.forward):
        engine = start(rank, place)
        for step in range(2):
            engine.backward(call(engine)(**CASE.batch(step, rank.rank, 0)))
            engine.step()
        results.append(zoo.state_of(engine)["digest"])
        engine.close()
    assert results[0] == results[1]


def gradients_from_before(rank, place):
    """What an earlier training left in ``grad`` is not this one's."""
    norms = []
    for stale in (False, True):
        model = zoo.make(CASE)
        model.outlet.requires_grad_(False)
        for parameter in model.parameters() if stale else ():
            parameter.grad = torch.ones_like(parameter)
        engine = zerobench.initialize(model, config=rank.config(**PLACES[place]))
        train(engine, rank, 1)
        norms.append(engine.get_global_grad_norm())
        engine.close()
    assert norms[0] == norms[1]


def changing_the_model(rank, place):
    """Parameters that come, are frozen or thawed behind the engine's back."""
    engine = start(rank, place)
    engine.module.extra = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"'extra\.weight' came into the model after"):
        train(engine, rank, 1)
    del engine.module.extra
    engine.module.blocks[1].up.requires_grad_(False)
    with pytest.raises(StateError, match=r"'blocks\.1\.up\.weight' is trained since"):
        train(engine, rank, 1)
    engine.module.blocks[1].up.requires_grad_(True)
    engine.close()


def two_engines(rank, place):
    """One model has one engine at a time."""
    engine = start(rank, place)
    train(engine, rank, 1)
    for model in (engine.module, nn.Sequential(engine.module)):
        with pytest.raises(ConfigError, match=r"an engine trains this Chain already; call that engine's close\(\)"):
            zerobench.initialize(model, config=rank.config(**PLACES[place]))
    train(engine, rank, 1, first=1)
    engine.close()
    if PLACES[place]["stage"] < 3:
        engine = zerobench.initialize(engine.module, config=rank.config(**PLACES[place]))
        train(engine, rank, 1)
        engine.close()


def copying(rank, place):
    """A trained model's hooks lead to its engine, so a copy would train nothing."""
    engine = start(rank, place)
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match=r"copy it before zerobench\.initialize"):
            call(engine.module)
    engine.close()


def buffers(rank, place):
    """Expanded ones are written like others; sparse ones are refused."""
    model = zoo.make(CASE)
    model.register_buffer("rows", torch.full((3, 1), float(rank.rank)).expand(3, 4))
    engine = zerobench.initialize(model, config=rank.config(**PLACES[place]))
    assert torch.equal(model.rows, torch.zeros(3, 4))
    engine.close()
    model = zoo.make(CASE)
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="buffer 'table' of Chain is sparse"):
        zerobench.initialize(model, config=rank.config(**PLACES[place]))


def gathering_one(rank, place):
    """``gather`` takes a parameter, a module, or the engine."""
    engine = start(rank, place)
    for what in (engine.module.outlet.weight, engine.module.outlet, engine, [engine.module.outlet.weight]):
        with engine.gather(what):
            assert engine.module.outlet.weight.sum().isfinite()
    engine.close()


CHECKS = [
    (loading, ("fp32",)),
    (loading, ("bf16",)),
    (resuming, ("fp32",)),
    (resuming, ("fp16",)),
    (reading, ()),
    (computing_elsewhere, ()),
    (forward_by_name, ()),
    (gradients_from_before, ()),
    (changing_the_model, ()),
    (two_engines, ()),
    (copying, ()),
    (buffers, ()),
    (gathering_one, ()),
]
RUNS = [(check, (place, *arguments)) for place in PLACES for check, arguments in CHECKS]
LABELS = [f"{check.__name__}-{'-'.join(map(str, arguments))}" for check, arguments in RUNS]


@pytest.fixture(scope="module", params=[1, 2])
def outcomes(request):
    return ranks.run(ranks.run_checks, RUNS, world_size=request.param)


@pytest.mark.parametrize("index", range(len(RUNS)), ids=LABELS)
def test_scripts(outcomes, index):
    for rank, errors_of_rank in enumerate(outcomes):
        assert errors_of_rank[index] is None, f"rank {rank}: {errors_of_rank[index]}"
