"""AdamW replayed from first moments, against torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobench.bench.rank.replay import optimizer_deviation, replayed, sample
from zerobench.strategies.base import OptimizerSettings
from zerobench.strategies.shared import make_adamw

STEPS = 4
ASKED = OptimizerSettings(lr=1e-3, weight_decay=0.1)


def trained(
    made: OptimizerSettings, *, scale: float = 0.02, seed: int = 0, numel: int = 500
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(parameters, initial parameters, first moments after each step) of torch's fused AdamW."""
    generator = torch.Generator().manual_seed(seed)
    initial = scale * torch.randn(numel, generator=generator)
    parameter = initial.clone().requires_grad_()
    optimizer = make_adamw([parameter], made)
    moments = []
    for _ in range(STEPS):
        parameter.grad = 1e-3 * torch.randn(numel, generator=generator)
        optimizer.step()
        moments.append(optimizer.state[parameter]["exp_avg"].clone())
    return parameter.detach(), initial, moments


@settings(max_examples=60, deadline=None)
@given(
    lr=st.sampled_from([1e-6, 1e-5, 3e-4, 1e-3, 0.03]),
    beta1=st.sampled_from([0.8, 0.9, 0.95]),
    beta2=st.sampled_from([0.9, 0.99, 0.999]),
    eps=st.sampled_from([1e-8, 1e-6]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.1]),
    scale=st.sampled_from([0.0, 0.02, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_what_torch_makes_of_its_gradients_is_what_is_replayed(
    lr, beta1, beta2, eps, weight_decay, scale, seed
) -> None:
    made = OptimizerSettings(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    assert optimizer_deviation(*trained(made, scale=scale, seed=seed), made) < 2e-6


@pytest.mark.parametrize(
    "other",
    [
        {"lr": 1.005e-3}, {"beta1": 0.91}, {"beta2": 0.99}, {"eps": 1e-6}, {"weight_decay": 0.0},
        {"weight_decay": 0.2},
    ],
)  # fmt: skip
def test_other_hyperparameters_show(other) -> None:
    assert optimizer_deviation(*trained(replace(ASKED, **other)), ASKED) > 1e-3


def test_small_rates_of_large_parameters_are_not_lost_in_rounding() -> None:
    made = replace(ASKED, lr=1.05e-5)
    assert optimizer_deviation(*trained(made, scale=1.0), replace(ASKED, lr=1e-5)) > 1e-2


def test_a_part_that_missed_an_update_shows_though_its_moments_are_right() -> None:
    parameters, initial, moments = trained(ASKED)
    parameters[:16] += 0.25 * (initial - parameters)[:16]
    assert optimizer_deviation(parameters, initial, moments, ASKED) > 0.02


def test_nan_is_found() -> None:
    parameters, initial, moments = trained(ASKED)
    parameters[3] = float("nan")
    assert not optimizer_deviation(parameters, initial, moments, ASKED) <= 1.0


def test_what_has_neither_gradient_nor_size_does_not_deviate() -> None:
    zeros = torch.zeros(5)
    assert optimizer_deviation(zeros, zeros, [zeros] * STEPS, ASKED) == 0.0
    assert torch.equal(replayed(zeros, [zeros], ASKED), zeros.double())


@pytest.mark.parametrize("numel", [0, 1, 1 << 14, (1 << 14) + 1, 1_000_003])
def test_samples_are_copies_that_are_spread_over_all_of_a_tensor(numel) -> None:
    tensor = torch.arange(float(numel)).view(1, numel)
    found = sample(tensor)
    assert found.shape == (len(found),) and len(found) <= 1 << 14
    assert len(found) >= (1 << 14) // 3 or len(found) == numel  # every third where every second would do
    if numel:
        assert found[0] == 0 and found[-1] >= numel - 1 - numel // 1000
        found.zero_()
        assert tensor[0, -1] == numel - 1


@pytest.mark.parametrize("shape", [(512, 4096), (4096, 4096), (50257, 1024), (12, 1 << 20)])
def test_samples_hold_a_share_of_every_ranks_columns(shape) -> None:
    columns = torch.arange(shape[1]).expand(shape)
    per_rank = sample(columns).div(shape[1] // 8, rounding_mode="floor").bincount(minlength=8)
    assert per_rank.min() > 0.9 * per_rank.max()
