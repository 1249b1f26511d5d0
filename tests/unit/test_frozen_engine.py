"""An engine without trainable parameters on one rank: what it does as a model does, and what it refuses."""

from __future__ import annotations

import pytest
import small_models
import torch
import zoo
from torch import nn

import zerobench
from zerobench.errors import ConfigError, StateError

AWAY = {"offload_optimizer": {"chunk_numel": 128}, "offload_param": {}}
CONFIGS = [{"stage": stage} for stage in range(4)] + [{"stage": 3} | AWAY]


def start(model: nn.Module, **config):
    model_parameters = config.pop("model_parameters", None)
    return zerobench.initialize(model, config={"world_size": 1} | config, model_parameters=model_parameters)


def frozen() -> nn.Module:
    torch.manual_seed(0)
    return small_models.Chain(3).requires_grad_(False)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_forwards_are_the_models(config):
    expected = frozen()(**zoo.points(0, 0))
    engine = start(frozen(), **config)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(engine.eval()(**zoo.points(0, 0)), expected)
    assert not engine.module.training and engine.train().module.training
    engine.close()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_training_it_is_an_error_that_says_what_to_do(config):
    engine = start(frozen(), **config)
    loss = engine(**zoo.points(0, 0))
    for call in (
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine.step(end_window=True),
        engine.optimizer.step,
        engine.grad_norm,
        lambda: engine.clip_grad_norm_(1.0),
        lambda: engine.gradients().__enter__(),
        lambda: engine.set_gradient_accumulation_boundary(True),
    ):
        with pytest.raises(
            StateError, match=r"without trainable parameters.*requires_grad_\(True\).*new engine"
        ):
            call()
    with pytest.raises(StateError, match=r"by loss\.backward\(\)"):
        engine.backward(loss)
    engine.close()


def test_what_asks_about_training_answers():
    engine = start(frozen(), stage=2, precision="fp16")
    engine.zero_grad()
    engine.optimizer.zero_grad()
    assert [group["params"] for group in engine.optimizer.param_groups] == [[]]
    assert engine.loss_scale == 1.0 and engine.loss_scale_state() is None
    assert engine.global_steps == 0 and not engine.was_step_applied()
    assert engine.get_global_grad_norm() is None
    engine.close()


@pytest.mark.parametrize(
    "config",
    [
        {"stage": 2, "offload_optimizer": {}},
        {"stage": 3, "offload_optimizer": {"ratio": 0.5}},
        {"stage": 1, "offload_optimizer": {"ratio": "auto"}},
        {"stage": 3, "optimizer_in_backward": True},
    ],
    ids=str,
)
def test_settings_of_an_optimizer_change_nothing(config):
    engine = start(frozen(), **config)
    assert torch.equal(engine(**zoo.points(0, 0)), frozen()(**zoo.points(0, 0)))
    assert engine.full_state()["exp_avg"] == {}
    engine.close()


def test_groups_without_trainable_parameters_are_a_frozen_model():
    for given in (
        filter(lambda parameter: parameter.requires_grad, frozen().parameters()),
        [{"params": [], "lr": 0.5}],
    ):
        engine = start(frozen(), model_parameters=given)
        assert len(engine.optimizer.param_groups) == 1
        engine.close()
    model = frozen()
    engine = start(model, model_parameters=[{"params": model.parameters(), "lr": 0.5}])
    assert engine.optimizer.param_groups[0]["lr"] == 0.5
    engine.close()


def test_parameters_made_in_inference_mode_are_an_error():
    with torch.inference_mode():
        model = frozen()
    with pytest.raises(
        ConfigError, match=r"'inlet\.weight' was made in torch\.inference_mode\(\).*torch\.no_grad\(\)"
    ):
        start(model)


def test_trainable_parameters_that_no_group_has_are_an_error():
    model = small_models.Chain(3)
    model.inlet.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"'blocks\.0\.norm\.weight' needs a gradient but is in no param group"
    ):
        start(model, model_parameters=model.inlet.parameters())
    with pytest.raises(ConfigError, match="no parameters to train"):
        start(model, model_parameters=[])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradients_reach_inputs(config):
    batch = zoo.points(0, 0)
    expected = batch["x"].clone().requires_grad_()
    frozen()(expected, batch["y"]).backward()
    engine = start(frozen(), **config)
    x = batch["x"].clone().requires_grad_()
    engine(x, batch["y"]).backward()
    assert torch.equal(x.grad, expected.grad)
    engine.close()


def test_frozen_parts_of_a_trained_model_leave_the_device_too():
    engine = start(small_models.lora(merged=False), stage=3, **AWAY)
    engine.backward(engine(**zoo.points(0, 0)))
    engine.step()
    held = engine.memory_bytes()
    flats = [flat for unit in engine.units() for flat in unit["flats"]]
    assert held["device"].get("parameters", 0) == 0
    assert held["host"]["parameters"] == 4 * sum(flat["shard_numel"] for flat in flats)
    assert held["host"]["exp_avg"] == 4 * sum(flat["shard_numel"] for flat in flats if flat["trainable"])
    engine.close()
