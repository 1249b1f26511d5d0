"""Requirements on a state that is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerobench.engine.state_checks import checked_for_loading, checked_states
from zerobench.engine.unheld_tensors import unheld_tensors
from zerobench.errors import ConfigError


class Model(nn.Module):
    """With a frozen parameter, one of integers, and buffers that belong to its state and that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.linear.bias.requires_grad_(False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("made_again", torch.zeros(2), persistent=False)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.norm.register_buffer("made_again", torch.zeros(2), persistent=False)


NAMED = dict(Model().named_parameters())


def states(**changes: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    weight, bias = torch.ones(3, 2, dtype=torch.float16), torch.ones(3)
    trained = {"linear.weight": weight}
    return {
        "parameters": {**trained, "linear.bias": bias},
        "exp_avg": trained,
        "exp_avg_sq": trained,
        **changes,
    }


def test_what_is_trained_has_all_states_and_what_is_frozen_its_values() -> None:
    found = checked_states(NAMED, states(), may_be_none=False)
    assert {kind: sorted(tensors) for kind, tensors in found.items()} == {
        "parameters": ["linear.bias", "linear.weight"],
        "exp_avg": ["linear.weight"],
        "exp_avg_sq": ["linear.weight"],
    }
    assert {tensor.dtype for tensors in found.values() for tensor in tensors.values()} == {torch.float32}
    more = states(exp_avg=dict(states()["parameters"]))  # of a run that trained the bias, too
    assert sorted(checked_states(NAMED, more, may_be_none=False)["exp_avg"]) == ["linear.weight"]


@pytest.mark.parametrize("kind", ["parameters", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, r"have no 'linear\."),
        ({**states()["parameters"], "other": torch.ones(1)}, "have 'other', which the model lacks"),
        (
            {**states()["parameters"], "linear.weight": torch.ones(2, 3)},
            r"have shape \(2, 3\), the model's have \(3, 2\)",
        ),
        ({**states()["parameters"], "linear.weight": 1.0}, "must be a tensor, not float"),
        ([1], "must be tensors by name, not list"),
    ],
)
def test_what_does_not_fit_is_named(kind, tensors, words) -> None:
    with pytest.raises(ConfigError, match=f"{kind}.*{words}"):
        checked_states(NAMED, states(**{kind: tensors}), may_be_none=True)


def test_no_state_at_all_is_one_only_where_it_may_be() -> None:
    none = {"parameters": {}, "exp_avg": {}, "exp_avg_sq": {}}
    assert checked_states(NAMED, none, may_be_none=True) == none
    with pytest.raises(ConfigError, match="the parameters to load have no"):
        checked_states(NAMED, none, may_be_none=False)


GROUPS = [{"params": [], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]


def checked(*, scales_loss=True, **given):
    fields = {"step": 0, "loss_scale": None, "param_groups": None, "buffers": None} | given
    return checked_for_loading(
        NAMED, states(), **fields, scales_loss=scales_loss, groups=GROUPS, unheld={}, may_be_none=False
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(("step", step, "a whole number of at least 0") for step in (-1, 2.5, "a", None, 2**63)),
        *(
            ("loss_scale", scale, "a positive 'scale' and a count of 'good_steps'")
            for scale in (
                5,
                {"scale": 1.0},
                {"scale": "x", "good_steps": 0},
                {"scale": float("inf"), "good_steps": 0},
                {"scale": 1.0, "good_steps": 0.5},
                {"scale": 1.0, "good_steps": -1},
            )
        ),
        *(("param_groups", groups, "a list of dicts") for groups in ([5], {"lr": 1.0}, 5)),
        ("param_groups", [], "has 0 param groups and the engine 1"),
        ("param_groups", [{"lr": float("nan")}], "group 0 has lr nan.*in the state to load"),
        ("param_groups", [{"betas": 0.9}], "must be two numbers"),
    ],
)
def test_numbers_that_cannot_be_are_refused(field, value, words) -> None:
    with pytest.raises(ConfigError, match=words):
        checked(**{field: value})


def test_numbers_that_can_be_are_taken() -> None:
    found = checked(
        step=torch.tensor(3),
        loss_scale={"scale": 2, "good_steps": 1},
        param_groups=[{"params": [1], "lr": torch.tensor(0.5), "max_lr": 1.0}],
    )
    assert (found.step, found.loss_scale, found.param_groups) == (3, (2.0, 1), [{"lr": 0.5, "max_lr": 1.0}])
    with pytest.raises(ConfigError, match="only fp16"):
        checked(scales_loss=False, loss_scale={"scale": 2.0, "good_steps": 0})


def test_a_state_has_persistent_buffers_and_parameters_of_integers() -> None:
    of_norm = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert sorted(unheld_tensors(Model())) == ["kept", *of_norm, "table"]
