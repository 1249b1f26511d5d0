"""Actions of training scripts besides training: loading, saving, reading between steps, changing the model."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import ranks
import small_models
import torch
import zoo
from torch import nn
from torch.optim import lr_scheduler

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


def start(rank, place, forward=None, **config):
    model = zoo.make(CASE)
    if forward is not None:
        model.forward = types.MethodType(forward, model)
    settings = zoo.optimizer_config(CASE) | PLACES[place] | config
    return zerobench.initialize(model, config=rank.config(**settings))


def train(engine, rank, steps, first=0):
    for step in range(first, first + steps):
        zoo.run_plan(engine, CASE, step, rank.rank, [])


def reads_by_other_ranks(rank, place):
    """Return whether the last step's parameters arrive with the next forward, in which every rank takes part."""
    return rank.world_size > 1 and place == "2 on host"


def keeps_no_parameters(rank, place):
    """Between uses, so that touching one is an error."""
    return place == "3 on host" or (place == "3" and rank.world_size > 1)


def loading(rank, place, precision):
    """Load on rank 0: all ranks have its values, masters included, and keep them."""
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
    with pytest.raises(StateError, match=r"engine\.load_state_dict\(\)"):
        engine.module.outlet.load_state_dict({"weight": saved["outlet.weight"], "bias": saved["outlet.bias"]})
    engine.close()
    engine.module.load_state_dict(saved) if PLACES[place]["stage"] < 3 else None


SCHEDULES = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def resuming(rank, place, precision, schedule):
    """As docs/reference/training.md has it: a new engine and scheduler go on as the old ones would have."""

    def advance(engine, scheduler, first):
        for step in range(first, first + 2):
            train(engine, rank, 1, first=step)
            scheduler.step(*([1.0] if schedule == "plateau" else []))

    engine = start(rank, place, precision=precision)
    scheduler = SCHEDULES[schedule](engine.optimizer)
    advance(engine, scheduler, 0)
    file = io.BytesIO()
    torch.save({"engine": engine.full_state(), "scheduler": scheduler.state_dict()}, file)
    advance(engine, scheduler, 2)
    expected = zoo.state_of(engine)["digest"]
    engine.close()
    engine = start(rank, place, precision=precision)
    scheduler = SCHEDULES[schedule](engine.optimizer)
    file.seek(0)
    checkpoint = torch.load(file)
    engine.load_full_state(**checkpoint["engine"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    advance(engine, scheduler, 2)
    assert zoo.state_of(engine)["digest"] == expected
    with pytest.raises(ConfigError, match="2 param groups and the engine 1"):
        engine.load_full_state(**checkpoint["engine"] | {"param_groups": [{}, {}]})
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
            for read in (
                engine.module.state_dict,
                engine.module.blocks[1].state_dict,
                lambda: engine.outlet(torch.ones(1, small_models.WIDTH)),
            ):
                with pytest.raises(StateError, match=r"engine\.state_dict\(\)"):
                    read()
            assert engine.training and engine.modules() is not None
            with engine.gather():
                seen = copy.deepcopy(dict(engine.module.state_dict()))
        elif step % 2:
            seen = copy.deepcopy(dict(engine.module.state_dict()))
        else:
            if place == "2 on host":
                with pytest.raises(RuntimeError, match=r"'inlet\.weight' is being updated .*engine\.gather"):
                    engine.module.inlet.weight.detach().clone()
                engine.module.state_dict()  # no other rank has a part in the updates: it waits for them
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
    """Ignore gradients that an earlier training left in ``grad``."""
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
    bias, engine.module.blocks[1].up.bias = engine.module.blocks[1].up.bias, None
    with pytest.raises(StateError, match=r"'blocks\.1\.up\.bias' left the model after"):
        train(engine, rank, 1)
    engine.module.blocks[1].up.bias = bias
    engine.module.blocks[1].up.requires_grad_(False)
    with pytest.raises(StateError, match=r"'blocks\.1\.up\.weight' is trained since"):
        train(engine, rank, 1)
    engine.module.blocks[1].up.requires_grad_(True)
    engine.close()


def resizing(rank, place):
    """As embeddings are for a larger vocabulary, in place."""
    if keeps_no_parameters(rank, place):
        return  # there the next forward finds another storage
    engine = start(rank, place, forward_of_the_first)
    engine.module.outlet.weight.data = engine.module.outlet.weight.data.repeat(2, 1)
    with pytest.raises(StateError, match=r"'outlet\.weight' had shape \(\d+, \d+\) when .* before zerobench"):
        train(engine, rank, 1)
    engine.close()


def forward_of_the_first(self, x, y):
    """With as much of the outlet as ``y`` has."""
    h = self.inlet(x)
    for block in self.blocks:
        h = block(h)
    weight, bias = self.outlet.weight, self.outlet.bias
    found = nn.functional.linear(h, weight[: len(bias)], bias)
    return nn.functional.mse_loss(found.float(), y.float())


def changing_in_a_forward(rank, place):
    """A model that sets parameters in its first forward: an error, and what it says helps."""
    for name in ("outlet.bias", "blocks.1.up.bias"):
        engine = start(rank, place, forward_that_sets)
        engine.module.to_set = engine.module.get_submodule(name.removesuffix(".bias"))
        with pytest.raises(StateError, match=rf"'{name}' was changed in place.*modifier_rank=0"):
            train(engine, rank, 1)
        with engine.gather(modifier_rank=0):  # the value is set already and everybody's, if it is not gone
            pass
        train(engine, rank, 1)
        engine.close()
        engine = start(rank, place, forward_that_sets, precision="bf16")
        engine.module.to_set = engine.module.get_submodule(name.removesuffix(".bias"))
        with engine.gather(modifier_rank=0), torch.no_grad():
            engine(**CASE.batch(0, rank.rank, 0))
        engine.load_state_dict(engine.state_dict())
        engine.load_full_state(**engine.full_state())
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, rank, 2)
        with engine.gather():
            pass
        train(engine, rank, 2, first=2)
        assert (engine.full_parameters()[name] == 3.0).all()
        engine.close()


def forward_that_sets(self, x, y):
    if getattr(self, "to_set", None) is not None:
        self.to_set.register_forward_pre_hook(set_once)
        self.to_set = None
    return type(self).forward(self, x, y)


def set_once(module, _):
    if not hasattr(module, "is_set"):
        module.is_set = True
        with torch.no_grad():
            module.bias.fill_(3.0)


def changing_what_is_frozen(rank, place):
    """Change frozen parameters, which is allowed if they are not sharded: a teacher that follows its student, say."""
    if PLACES[place]["stage"] == 3:
        return
    model = zoo.make(CASE)
    model.blocks[1].requires_grad_(False)
    engine = zerobench.initialize(model, config=rank.config(**zoo.optimizer_config(CASE) | PLACES[place]))
    for step in range(3):
        with torch.no_grad():
            model.blocks[1].up.weight.lerp_(model.blocks[1].down.weight.t(), 0.5)
        train(engine, rank, 1, first=step)
    assert torch.equal(engine.state_dict()["blocks.1.up.weight"], model.blocks[1].up.weight)
    engine.close()


def two_engines(rank, place):
    """One model has one engine at a time."""
    engine = start(rank, place)
    train(engine, rank, 1)
    for model in (engine.module, nn.Sequential(engine.module), engine.module.blocks[1]):
        with pytest.raises(
            ConfigError, match=r"trains this (Chain|Block) already; call that engine's close\(\)"
        ):
            zerobench.initialize(model, config=rank.config(**PLACES[place]))
    other = zoo.make(CASE)
    other.outlet = engine.module.outlet  # by a part that has no hooks of its own
    for model, name in ((other, "outlet.weight"), (engine.module.outlet, "weight")):
        with pytest.raises(ConfigError, match=rf"holds parameter '{name}' already.*that engine's close\(\)"):
            zerobench.initialize(model, config=rank.config(**PLACES[place]))
    train(engine, rank, 1, first=1)
    engine.close()
    if PLACES[place]["stage"] < 3:
        engine = zerobench.initialize(engine.module, config=rank.config(**PLACES[place]))
        train(engine, rank, 1)
        engine.close()


def sharing_an_activation(rank, place):
    """A module without parameters that is part of another model, too, which stays that model's."""
    activation = nn.Tanh()
    other = nn.Sequential(nn.Linear(2, 2), activation)
    model = zoo.make(CASE)
    model.activation = activation
    engine = zerobench.initialize(model, config=rank.config(**(zoo.optimizer_config(CASE) | PLACES[place])))
    train(engine, rank, 1)
    other.load_state_dict(copy.deepcopy(other).state_dict())
    engine.close()


def copying(rank, place):
    """A trained model's hooks lead to its engine, so a copy would train nothing."""
    engine = start(rank, place)
    with engine.gather():
        for model in (engine.module, engine.module.blocks):
            for call in (copy.deepcopy, pickle.dumps):
                with pytest.raises(StateError, match=r"copy it before zerobench\.initialize"):
                    call(model)
    engine.close()


def other_weights(rank, place):
    """Evaluating with other weights inside a gather, and going on with the masters that were there."""
    engine = start(rank, place, precision="bf16")
    train(engine, rank, 2)
    before = zoo.state_of(engine)["digest"]
    batch = CASE.batch(9, 0, 0)
    with torch.no_grad():
        usual = engine(**batch).item()
        with engine.gather(modifier_rank=0):
            own = copy.deepcopy(dict(engine.module.state_dict()))
            engine.module.load_state_dict({name: 0.5 * value for name, value in own.items()})
            other = engine(**batch).item()
            engine.module.load_state_dict(own)
        assert engine(**batch).item() == usual != other
    assert zoo.state_of(engine)["digest"] == before
    engine.close()


def buffers(rank, place):
    """Expanded ones are written like others; views stay views; sparse ones are refused, and the model stays whole."""
    model = zoo.make(CASE)
    model.register_buffer("rows", torch.full((3, 1), float(rank.rank)).expand(3, 4))
    model.register_buffer("table", torch.full((2, 3), float(rank.rank)))
    model.register_buffer("turned", model.table.t())
    engine = zerobench.initialize(model, config=rank.config(**PLACES[place]))
    assert torch.equal(model.rows, torch.zeros(3, 4)) and torch.equal(model.table, torch.zeros(2, 3))
    assert model.turned.data_ptr() == model.table.data_ptr()
    engine.close()
    model = zoo.make(CASE)
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="buffer 'table' is sparse"):
        zerobench.initialize(model, config=rank.config(**PLACES[place]))
    model.table = model.table.to_dense()
    zerobench.initialize(model, config=rank.config(**PLACES[place])).close()


def inference_tensors(rank, place):
    """Blocks that hand one on, of which torch counts no versions."""
    model = small_models.Handing()
    model.blocks[0].bias.requires_grad_(False)
    with torch.inference_mode():
        made = torch.zeros(1, small_models.WIDTH)
    model.inlet.register_forward_hook(lambda *_: None)
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: (*output, made))
        block.register_forward_pre_hook(lambda _, args: args[:2])
    digest = zoo.digest(dict(model.state_dict()))
    model.forward = types.MethodType(forward_with_more, model)
    engine = zerobench.initialize(model, config=rank.config(**PLACES[place]))
    train(engine, rank, 2)
    assert zoo.digest(engine.state_dict()) != digest
    engine.close()


def forward_with_more(self, x, y):
    h, bias, more = self.inlet(x), None, None
    for block in self.blocks:
        h, bias, more = block(h, bias, more)
    return nn.functional.mse_loss(self.outlet(h + bias).float(), y.float())


def calling_forward(rank, place):
    """Blocks whose ``forward`` is called by name, which no hook sees."""
    digests = []
    for forward in (None, forward_of_forwards):
        engine = start(rank, place, forward)
        if forward is not None and keeps_no_parameters(rank, place):
            with pytest.raises(RuntimeError, match=r"'blocks\.0\.\S*' is sharded .*module\.forward\(\)"):
                engine(**CASE.batch(0, rank.rank, 0))
            engine.close()
            return
        train(engine, rank, 3)
        digests.append(zoo.state_of(engine)["digest"])
        engine.close()
    assert digests[0] == digests[1]


def using_before_the_call(rank, place):
    """A use of a block's parameters by the model, before the block is called: waited for from the first step on, and an
    error where it comes later."""
    late = place == "2 on host"
    if keeps_no_parameters(rank, place):
        return
    digests = []
    for units in ("auto", []):  # the blocks, or none
        engine = start(rank, place, forward_of_early_use, units=units)
        train(engine, rank, 3)
        assert [unit["name"] for unit in engine.units() if unit["is_awaited_early"]] == (
            ["blocks.2"] if units == "auto" else []
        )
        digests.append(zoo.state_of(engine)["digest"])
        engine.close()
    assert digests[0] == digests[1]
    engine = start(rank, place, forward_of_early_use)
    engine.module.is_early = False
    train(engine, rank, 3)  # in the first steps a forward waits for all updates, to look at parameters
    engine.module.is_early = True
    if late:
        with pytest.raises(
            RuntimeError, match=r"'blocks\.2\.up\.weight' is being updated .*configuration's units"
        ):
            train(engine, rank, 1, first=3)
    else:
        train(engine, rank, 1, first=3)
    engine.close()


def forward_of_early_use(self, x, y):
    h = self.inlet(x)
    if getattr(self, "is_early", True):
        h = h + nn.functional.linear(
            nn.functional.linear(h, self.blocks[2].up.weight), self.blocks[2].down.weight
        )
    for block in self.blocks:
        h = block(h)
    return nn.functional.mse_loss(self.outlet(h).float(), y.float())


def forward_of_forwards(self, x, y):
    h = self.inlet(x)
    for block in self.blocks:
        h = block.forward(h)
    return nn.functional.mse_loss(self.outlet(h).float(), y.float())


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
    (resuming, ("fp32", "steps")),
    (resuming, ("bf16", "cosine")),
    (resuming, ("fp32", "cycle")),
    (resuming, ("fp16", "plateau")),
    (reading, ()),
    (computing_elsewhere, ()),
    (forward_by_name, ()),
    (gradients_from_before, ()),
    (changing_the_model, ()),
    (resizing, ()),
    (changing_in_a_forward, ()),
    (changing_what_is_frozen, ()),
    (two_engines, ()),
    (copying, ()),
    (sharing_an_activation, ()),
    (other_weights, ()),
    (buffers, ()),
    (inference_tensors, ()),
    (gathering_one, ()),
    (calling_forward, ()),
    (using_before_the_call, ()),
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
