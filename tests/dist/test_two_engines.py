"""Two models in one loss: a generator and its discriminator, or two towers; by engines or by a plain loop."""

from __future__ import annotations

import pytest
import ranks
import torch
from torch import nn

import zerobench
from zerobench import errors

LR = 0.05
STAGES = (0, 1, 2)
GENERATORS = (None, 0, 3)  # None: a plain loop


def net(inputs: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(inputs)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def start(rank, model, stage):
    return zerobench.initialize(
        model, config=rank.config(stage=stage, optimizer={"type": "adamw", "lr": LR, "weight_decay": 0.0})
    )


def train(generator, discriminator, generator_backward, discriminator_backward, *, freezes, steps=3):
    """On the same data everywhere."""
    model = getattr(discriminator, "module", discriminator)
    for step in range(steps):
        noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        discriminator_backward(discriminator(generator(noise).detach()).square().mean())
        model.requires_grad_(not freezes)
        loss = (discriminator(generator(noise)) - 1.0).square().mean()
        generator_backward(loss)
        model.requires_grad_(True)


def backward_of(engine):
    def backward(loss):
        engine.backward(loss)
        engine.step()

    return backward


def plain_backward_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def backward(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return backward


def trained_apart(rank):
    """Return the end of each combination: a frozen discriminator passes gradients on and gets none."""
    ends = {}
    for stage in STAGES:
        for of_generator in GENERATORS:
            plain = net(4, 8)
            discriminator = start(rank, net(8, 1), stage)
            generator = plain if of_generator is None else start(rank, plain, of_generator)
            train(
                generator,
                discriminator,
                plain_backward_of(plain) if of_generator is None else backward_of(generator),
                backward_of(discriminator),
                freezes=True,
            )
            ends[stage, of_generator] = discriminator.full_parameters()
            discriminator.close()
    return ends


def test_a_generator_trains_through_a_frozen_discriminator():
    generator, discriminator = net(4, 8), net(8, 1)
    train(
        generator,
        discriminator,
        plain_backward_of(generator),
        plain_backward_of(discriminator),
        freezes=True,
    )
    expected = dict(discriminator.named_parameters())
    for ends in ranks.run(trained_apart):
        assert len(ends) == len(STAGES) * len(GENERATORS)
        for point, found in ends.items():
            for name, parameter in expected.items():
                assert torch.allclose(found[name], parameter, atol=1e-5), (point, name)


def not_frozen(rank):
    """Return the error of each combination, after which both go on."""
    said = {}
    for stage in STAGES:
        for of_generator in GENERATORS:
            plain = net(4, 8)
            discriminator = start(rank, net(8, 1), stage)
            generator = plain if of_generator is None else start(rank, plain, of_generator)
            backwards = (
                plain_backward_of(plain) if of_generator is None else backward_of(generator),
                backward_of(discriminator),
            )
            with pytest.raises((RuntimeError, errors.StateError)) as caught:
                train(generator, discriminator, *backwards, freezes=False)
            said[stage, of_generator] = str(caught.value)
            train(generator, discriminator, *backwards, freezes=True)
            discriminator.close()
    return said


def test_a_discriminator_that_is_not_frozen_is_an_error_that_says_so():
    for said in ranks.run(not_frozen):
        assert len(said) == len(STAGES) * len(GENERATORS)
        for text in said.values():
            assert "a generator through its discriminator" in text
            assert "requires_grad_(False) on the other before its forward" in text


class Towers(nn.Module):
    """Two models that meet in a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = net(4, 8), net(3, 8)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return loss_of(self.image(image), self.text(text))


def loss_of(image, text):
    return (image @ text.t()).diagonal().sub(1.0).square().mean()


def pairs(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=draw), torch.randn(5, 3, generator=draw)


def towers_apart(rank, stage, units):
    """Return the errors of both engines' backwards and a plain one for one loss, after which each trains alone."""
    towers = Towers()
    config = rank.config(stage=stage, units=units, gradient_accumulation_steps=1)
    image, text = (zerobench.initialize(tower, config=config) for tower in (towers.image, towers.text))
    said = []
    for engine in (image, text):
        given = pairs(0)
        with pytest.raises(errors.StateError) as caught:
            engine.backward(loss_of(image(given[0]), text(given[1])))
        said.append(str(caught.value))
    given = pairs(0)
    with pytest.raises((RuntimeError, errors.StateError)) as plain:
        loss_of(image(given[0]), text(given[1])).backward()
    said.append(str(plain.value))
    for engine, given in zip((image, text), pairs(1), strict=True):
        engine.backward(engine(given).square().mean())
        engine.step()
        assert engine.global_steps == 1
        engine.close()
    return said


@pytest.mark.parametrize(
    ("stage", "units", "place"),
    [(0, "auto", "parameter '2.bias'"), (2, ["Linear"], "parameter '2.bias'"), (3, ["Linear"], "unit '2'")],
)
def test_two_engines_in_one_loss_are_an_error_that_names_one_engine_for_both(stage, units, place):
    for said in ranks.run(towers_apart, stage, units):
        for text in said:
            assert text.startswith(f"this backward reached {place} of an engine that did not start it"), text
            assert "make one engine for both" in text
            assert "engine.backward(loss), not loss.backward()" in text


def towers_together(rank, stage):
    engine = start(rank, Towers(), stage)
    for step in range(3):
        engine.backward(engine(*pairs(step)))
        engine.step()
    parameters = engine.full_parameters()
    engine.close()
    return parameters


@pytest.mark.parametrize("stage", [0, 3])
def test_one_engine_trains_two_towers(stage):
    towers = Towers()
    backward = plain_backward_of(towers)
    for step in range(3):
        backward(towers(*pairs(step)))
    for found in ranks.run(towers_together, stage):
        for name, parameter in towers.named_parameters():
            assert torch.allclose(found[name], parameter, atol=1e-5), name
