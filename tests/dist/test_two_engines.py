"""A generator that trains through its discriminator, each by an engine or by a plain loop."""

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
    """Where each combination ends: a frozen discriminator passes gradients on and gets none."""
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
    """What each combination says, and that both go on behind it."""
    said = []
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
            said.append(str(caught.value))
            train(generator, discriminator, *backwards, freezes=True)
            discriminator.close()
    return said


def test_a_discriminator_that_is_not_frozen_is_an_error_that_says_so():
    for said in ranks.run(not_frozen):
        assert len(said) == len(STAGES) * len(GENERATORS)
        assert all("a generator through its discriminator" in text for text in said), said
        assert all("requires_grad_(False) on this one before that forward" in text for text in said), said
