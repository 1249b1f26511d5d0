"""Notices about what training leaves out, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerobench
from zerobench.engine.left_out import LeftOut

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = (0, 3)


class Net(nn.Module):
    """With a head that the forward leaves out until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.uses_spare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return (self.spare(x) if self.uses_spare else x).square().mean()


def start(stage: int = 0, model: nn.Module | None = None, **config) -> zerobench.Engine:
    return zerobench.initialize(model or Net(), config={"stage": stage, "world_size": 1, **config})


def train(engine: zerobench.Engine, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()


def told(caplog) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_a_gradient_are_named_after_ten_steps_and_at_the_end(stage, caplog):
    engine = start(stage)
    train(engine, LeftOut.first_steps - 1)
    assert told(caplog) == []
    train(engine, 1)
    (text,) = told(caplog)
    assert text.startswith(
        "[rank 0] no gradient came on this rank in the first 10 steps for 2 trained parameters: "
    )
    assert "'spare.weight', 'spare.bias'." in text and "body" not in text
    train(engine, 5)
    assert told(caplog) == []
    engine.close()
    (text,) = told(caplog)
    assert "in any of 15 steps for 2 trained parameters: 'spare.weight', 'spare.bias'." in text
    engine.close()
    assert told(caplog) == []


def test_a_short_training_names_them_at_the_end(caplog):
    engine = start()
    train(engine, 3)
    assert told(caplog) == []
    engine.close()
    assert ["in any of 3 steps" in text for text in told(caplog)] == [True]


def test_an_engine_without_steps_names_nothing(caplog):
    engine = start()
    engine(torch.ones(2, 4))
    engine.close()
    assert told(caplog) == []


def test_a_gradient_after_the_notice_is_not_missing_at_the_end(caplog):
    engine = start()
    train(engine, 10)
    assert len(told(caplog)) == 1
    engine.module.uses_spare = True
    train(engine, 1)
    engine.close()
    assert told(caplog) == []


def test_gradients_of_any_micro_batch_count(caplog):
    engine = start(gradient_accumulation_steps=2)
    engine.module.uses_spare = True
    train(engine, 1)
    engine.module.uses_spare = False
    train(engine, 25)
    engine.close()
    assert told(caplog) == []


def test_only_parameters_without_a_gradient_keep_a_hook():
    engine = start()
    mine = engine.module.body.bias.register_hook(lambda gradient: None)
    train(engine, 1)
    assert engine.module.body.weight._backward_hooks is None
    assert list(engine.module.body.bias._backward_hooks) == [mine.id]
    assert len(engine.module.spare.weight._backward_hooks) == 1
    engine.close()
    assert all(not parameter._backward_hooks for parameter in engine.module.spare.parameters())


def test_many_names_are_cut_short(caplog):
    model = Net()
    model.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    engine = start(model=model)
    train(engine, 1)
    engine.close()
    (text,) = told(caplog)
    assert (
        "in the only step for 10 trained parameters: 'spare.weight'" in text and "'layers.1.bias'" not in text
    )
    assert text.count("'") == 10 and " and 5 more. " in text


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_come_later_are_named_once(stage, caplog):
    engine = start(stage)
    engine.module.uses_spare = True
    train(engine, 2)
    engine.module.adapter = nn.Linear(4, 4)
    engine.module.adapter.bias.requires_grad_(False)
    train(engine, 7)
    assert told(caplog) == []
    train(engine, 1)
    (text,) = told(caplog)
    assert text.startswith(
        "[rank 0] the engine does not train 1 parameter: 'adapter.weight', added to the model after"
    )
    engine.module.head = nn.Linear(4, 1, bias=False)
    train(engine, 89)
    assert told(caplog) == []
    train(engine, 1)
    (text,) = told(caplog)
    assert "1 parameter: 'head.weight'" in text
    engine.module.last = nn.Linear(4, 1)
    engine.close()
    (text,) = told(caplog)
    assert "2 parameters: 'last.weight', 'last.bias'" in text


def test_a_wrong_level_is_an_error_of_initialize(monkeypatch):
    monkeypatch.setenv("ZEROBENCH_LOG", "verbose")
    with pytest.raises(zerobench.errors.ConfigError, match="ZEROBENCH_LOG=verbose"):
        start()


def test_the_connection_is_told_at_level_info(caplog):
    caplog.set_level("INFO", logger="zerobench")
    start(stage=2).close()
    assert told(caplog)[0].startswith("[rank 0] world size 1, stage 2, communicator ")
