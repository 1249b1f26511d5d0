"""The optimizer object: param groups, schedulers, and what it refuses."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import small_models
import torch
import zoo

import zerobench
from zerobench.engine.config import OptimizerConfig
from zerobench.engine.optimizer import ZeroOptimizer
from zerobench.errors import ConfigError, StateError


def start(model, **arguments):
    return zerobench.initialize(model, config={"world_size": 1, "optimizer": {"lr": 0.5}}, **arguments)


def test_groups_have_defaults_and_their_own():
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer(
        [{"params": [a]}, {"params": [b], "lr": 0.1, "betas": (0.5, 0.6)}], OptimizerConfig(lr=2)
    )
    first, second = optimizer.hyperparameters()
    assert first == {
        "lr": 2.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "decoupled": True,
    }
    assert (second["lr"], second["beta1"], second["beta2"]) == (0.1, 0.5, 0.6)
    optimizer.param_groups[0]["lr"] = 7
    assert optimizer.hyperparameters()[0]["lr"] == 7.0
    assert not ZeroOptimizer([{"params": [a]}], OptimizerConfig(type="adam")).hyperparameters()[0][
        "decoupled"
    ]


def test_what_it_refuses():
    model = small_models.Bare()
    with pytest.raises(ConfigError, match="param group 0 has the unknown key 'learning_rate'"):
        start(model, model_parameters=[{"params": model.parameters(), "learning_rate": 1}])
    with pytest.raises(ConfigError, match=r"'second\.weight' needs a gradient but is in no param group"):
        start(model, model_parameters=model.first.parameters())
    with pytest.raises(
        ConfigError, match=r"param group 0 has a parameter of shape .* that the model does not have"
    ):
        start(model, model_parameters=[torch.nn.Parameter(torch.ones(4))])
    for mixed in ([{"params": [model.first.weight]}, model.first.bias], [model.first.bias, {"params": []}]):
        with pytest.raises(ConfigError, match="mixes param groups"):
            start(model, model_parameters=mixed)
    for lazy in (torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(affine=False)):
        with pytest.raises(ConfigError, match="run one forward before"):
            start(torch.nn.Sequential(lazy, model))
    with pytest.raises(ConfigError, match=r"not tuple; pass model\.parameters\(\)"):
        start(model, model_parameters=list(model.named_parameters()))
    for given in (model, torch.optim.SGD(model.parameters(), lr=1), [{"params": None}]):
        with pytest.raises(ConfigError, match=r"not (Bare|SGD|NoneType); pass model\.parameters\(\)"):
            start(model, model_parameters=given)
    with pytest.raises(ConfigError, match="param group 0 has no 'params'"):
        start(model, model_parameters=[{"lr": 1}])
    with pytest.raises(ConfigError, match="does not belong to an engine"):
        ZeroOptimizer([{"params": list(model.parameters())}], OptimizerConfig()).step()
    engine = start(model)
    with pytest.raises(ConfigError, match="does not support closures"):
        engine.optimizer.step(lambda: 0.0)
    engine.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr": -1}, r"param group 1 has lr -1\.0, which must be at least 0 and finite"),
        ({"lr": float("nan")}, "param group 1 has lr nan"),
        ({"lr": "fast"}, "param group 1 has lr 'fast', which must be a number"),
        ({"lr": torch.ones(2)}, "param group 1 has lr tensor"),
        ({"eps": None}, "param group 1 has eps None"),
        ({"weight_decay": float("inf")}, "param group 1 has weight_decay inf"),
        ({"betas": (0.9, 1)}, r"param group 1 has beta2 1\.0, which must be at least 0 and below 1"),
        ({"betas": 0.9}, r"param group 1 has betas 0\.9, which must be two numbers"),
        ({"betas": (0.9,)}, "which must be two numbers"),
    ],
    ids=str,
)
def test_hyperparameters_that_no_update_can_have_are_refused_at_once(given, said):
    model = small_models.Bare()
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias], **given}]
    with pytest.raises(ConfigError, match=rf"{said}.*; give zerobench\.initialize another"):
        start(model.requires_grad_(False).first.requires_grad_(), model_parameters=groups)


def test_hyperparameters_that_no_update_can_have_keep_the_gradients():
    engine = start(small_models.Bare())
    engine.backward(engine(**zoo.points(0, 0)))
    for wrong, said in ((-1.0, r"lr -1\.0"), ("fast", "lr 'fast'")):
        engine.optimizer.param_groups[0]["lr"] = wrong
        with pytest.raises(ConfigError, match=rf"{said}.*; set it in engine\.optimizer\.param_groups"):
            engine.step()
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)  # as compiled optimizers take it
    engine.step()
    assert engine.global_steps == 1
    engine.close()


def test_schedulers_work_without_warnings():
    engine, optimizer, loader, scheduler = start(small_models.Bare())
    assert loader is None and scheduler is None and isinstance(optimizer, torch.optim.Optimizer)
    assert engine[0] is engine and engine[1] is optimizer
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            engine.backward(engine(**zoo.points(0, 0)))
            engine.step()
            optimizer.zero_grad()
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 / 8
    engine.backward(engine(**zoo.points(0, 0)))
    optimizer.step()
    assert engine.global_steps == 4
    engine.close()


def test_numpys_numbers_are_saved_as_pythons():
    engine = start(small_models.Bare())
    engine.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    (group,) = engine.full_state()["param_groups"]
    assert group["lr"] == 0.25 and type(group["lr"]) is float
    engine.close()


def test_a_learning_rate_of_zero_changes_nothing():
    engine = start(small_models.Bare())
    engine.optimizer.param_groups[0]["lr"] = 0.0
    before = engine.state_dict()
    engine.backward(engine(**zoo.points(0, 0)))
    engine.step()
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.close()


def test_no_group_comes_after_the_engine():
    engine = start(small_models.Bare())
    with pytest.raises(StateError, match=r"initialize\(model_parameters="):
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(engine.optimizer.param_groups) == 1
    engine.close()
