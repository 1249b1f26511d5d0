"""Models on the meta device get the same values however and in whatever order their parts are materialised."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from builders import SMALL, tiny_model
from torch import nn

from zerobench.engine.units import find_units
from zerobench.errors import ConfigError
from zerobench.models.materialise import Origin, materialise, on_meta

small_model = partial(tiny_model, **SMALL | {"num_layers": 2})
on_the_meta_device = partial(small_model, device="meta")
whole = partial(small_model, device="cpu")


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def by_unit(model: nn.Module) -> list[list[str]]:
    units = find_units(model)
    unit_of = units.unit_of_parameters()
    return [[name for name, unit in unit_of.items() if unit == index] for index in range(len(units.names))]


@pytest.mark.parametrize("tied", [True, False])
def test_meta_models_hold_no_memory(tied):
    model = on_the_meta_device(tied_embeddings=tied)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (model.lm_head.weight is model.wte.weight) is tied


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backwards", [True, False])
def test_unit_by_unit_in_any_order_gives_the_whole_build(tied, backwards):
    model = on_the_meta_device(tied_embeddings=tied, vocab_size=512)
    for names in by_unit(model)[:: -1 if backwards else 1]:
        assert materialise(model, names, device="cpu") == names
    assert_equal(model, whole(tied_embeddings=tied, vocab_size=512))


def test_parameter_by_parameter_and_by_module_name():
    model = on_the_meta_device()
    for name in sorted(name for name, _ in model.named_parameters()):
        materialise(model, [name], device="cpu")
    assert_equal(model, whole())
    model = on_the_meta_device()
    done = materialise(model, ["blocks.1", "ln_f.bias"], device="cpu")
    assert "blocks.1.attn.qkv.weight" in done and "ln_f.bias" in done
    assert model.blocks[0].mlp.fc.weight.is_meta and model.ln_f.weight.is_meta
    materialise(model, device="cpu")
    assert_equal(model, whole())


def test_what_has_values_is_left_alone():
    model = on_the_meta_device()
    materialise(model, ["blocks.0"], device="cpu")
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.fill_(7.0)
    assert not any(name.startswith("blocks.0") for name in materialise(model, device="cpu"))
    assert all((parameter == 7.0).all() for parameter in model.blocks[0].parameters())
    assert materialise(model, device="cpu") == []


def test_objects_ties_and_requires_grad_stay():
    model = on_the_meta_device()
    model.wpe.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    materialise(model, device="cpu")
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
    assert model.lm_head.weight is model.wte.weight
    assert [p.requires_grad for p in (model.wpe.weight, model.wte.weight)] == [False, True]
    assert all(isinstance(p, nn.Parameter) and not p.is_meta for p in optimizer.param_groups[0]["params"])


class Decay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(3))
        for parameter in self.parameters():
            parameter._no_weight_decay = True
            parameter.register_hook(lambda gradient: 2 * gradient)

    def reset_parameters(self) -> None:
        self.real.fill_(1.0)
        self.empty.fill_(1.0)


def test_attributes_and_hooks_of_parameters_stay():
    model = on_meta(Decay)
    materialise(model, device="cpu")
    (model.real + model.empty).sum().backward()
    for parameter in model.parameters():
        assert parameter._no_weight_decay
        assert torch.equal(parameter.grad, torch.full((3,), 2.0))


def test_the_seed_is_the_builds_unless_given():
    first, second = on_the_meta_device(3), on_the_meta_device(4)
    materialise(first, device="cpu")
    materialise(second, device="cpu", seed=3)
    assert_equal(first, second)
    assert first.zerobench_origin == Origin(seed=3)
    assert not torch.equal(first.wte.weight, whole(4).wte.weight)


def test_global_random_state_plays_no_part():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = on_the_meta_device()
    materialise(model, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


class Orthogonal(nn.Module):
    """Makes tensors of its own on torch's default device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))

    def reset_parameters(self) -> None:
        self.weight.copy_(torch.eye(3))


def test_the_callers_default_device_plays_no_part():
    model = on_meta(Orthogonal)
    with torch.device("meta"):
        materialise(model, device="cpu")
    assert torch.equal(model.weight, torch.eye(3))


def test_parameters_of_equal_shape_differ():
    model = whole()
    assert not torch.equal(model.blocks[0].attn.qkv.weight, model.blocks[1].attn.qkv.weight)


class Plain(nn.Module):
    """Torch's layers only, which initialise themselves; a buffer with values, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.register_buffer("positions", torch.arange(5), persistent=False)


def test_any_model_of_torchs_layers():
    expected = on_meta(Plain)
    materialise(expected, device="cpu", seed=1)
    assert torch.equal(expected.positions, torch.arange(5))
    assert torch.equal(expected.norm.running_var, torch.ones(4))
    assert expected.inlet.weight.abs().max() <= 3**-0.5 and expected.inlet.weight.std() > 0.1
    model = on_meta(Plain)
    for name in ("norm", "attention", "conv", "inlet"):
        materialise(model, [name], device="cpu", seed=1)
    assert_equal(model, expected)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.noise.copy_(torch.randn(3))


def test_what_cannot_be_given_values_is_an_error():
    model = on_meta(lambda: nn.Sequential(Scale()))
    with pytest.raises(
        ConfigError, match=r"nothing gives '0\.scale' its first values: give Scale a reset_parameters"
    ):
        materialise(model, device="cpu")
    assert model[0].scale.is_meta
    with pytest.raises(ConfigError, match=r"draws with aten\.randn"):
        materialise(on_meta(lambda: nn.Sequential(Noise())), device="cpu")
    with torch.device("meta"):
        lost = Plain()
    with pytest.raises(ConfigError, match="nothing gives 'positions' its first values"):
        materialise(lost, device="cpu")


def test_unknown_names_are_an_error():
    with pytest.raises(ConfigError, match=r"no parameter or module 'blocks\.9'"):
        materialise(on_the_meta_device(), ["blocks.9"], device="cpu")


def test_build_takes_torchs_default_device():
    with torch.device("meta"):
        model = small_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.training
