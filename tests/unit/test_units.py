"""Which modules become units, and which unit a parameter belongs to."""

from __future__ import annotations

import pytest
import small_models
from builders import tiny_model
from torch import nn

from zerobench.engine.units import find_units
from zerobench.errors import ConfigError


def test_blocks_and_a_tied_embedding():
    model = tiny_model()
    units = find_units(model)
    assert units.names == ["root", *(f"blocks.{i}" for i in range(4))]
    assert units.modules[0] is model
    unit_of = units.unit_of_parameters()
    assert unit_of["blocks.2.mlp.fc.weight"] == 3
    assert {unit_of[name] for name in ("wte.weight", "wpe.weight", "ln_f.bias")} == {0}
    assert set(unit_of) == {name for name, _ in model.named_parameters()}


def test_large_untied_embeddings_and_heads_are_units():
    names = find_units(tiny_model(tied_embeddings=False, vocab_size=2048)).names
    assert names == ["root", "wte", *(f"blocks.{i}" for i in range(4)), "lm_head"]


@pytest.mark.parametrize(("rows", "is_unit"), [(11, True), (9, False)])
def test_what_is_small_beside_a_block_or_shared_is_no_unit(rows, is_unit):
    """Half of a block is large enough: here 20 x 20 of 20 x 40."""

    def names(*, tied: bool) -> list[str]:
        model = nn.ModuleDict({"embed": nn.Embedding(2 * rows, 20)})
        model["blocks"] = nn.Sequential(*(nn.Sequential(nn.Linear(20, 40, bias=False)) for _ in range(2)))
        model["head"] = nn.Linear(20, 2 * rows, bias=False)
        if tied:
            model["head"].weight = model["embed"].weight
        return find_units(model).names

    assert names(tied=False) == ["root", *["embed"] * is_unit, "blocks.0", "blocks.1", *["head"] * is_unit]
    assert names(tied=True) == ["root", "blocks.0", "blocks.1"]


def test_what_an_attention_reads_and_does_not_call_is_no_unit():
    model = nn.ModuleDict(
        {
            "blocks": nn.Sequential(*(small_models.Block() for _ in range(2))),
            "attention": nn.MultiheadAttention(64, 2),
            "head": nn.Linear(64, 64),
        }
    )
    assert find_units(model).names == ["root", "blocks.0", "blocks.1", "head"]


def test_a_parameter_of_two_units_belongs_to_the_root():
    units = find_units(small_models.Tied())
    unit_of = units.unit_of_parameters()
    assert units.names == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert unit_of["blocks.0.norm.weight"] == 0  # shared with block 2
    assert unit_of["blocks.1.norm.weight"] == 2
    assert unit_of["embed.weight"] == 0


def test_without_repeated_blocks_all_is_root():
    assert find_units(small_models.Bare()).names == ["root"]


def test_the_outermost_repeated_modules_are_taken():
    outer = nn.ModuleList(nn.Sequential(*(small_models.Block() for _ in range(2))) for _ in range(2))
    assert find_units(outer).names == ["root", "0", "1"]


def test_what_nobody_calls_is_no_unit():
    lists = nn.ModuleList(nn.ModuleList(small_models.Block() for _ in range(2)) for _ in range(2))
    assert find_units(lists).names == ["root", "0.0", "0.1", "1.0", "1.1"]
    projections = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    assert find_units(projections).names == ["root"]
    with pytest.raises(ConfigError, match="a ModuleList has no forward of its own"):
        find_units(lists, ["ModuleList"])


def test_blocks_that_differ_are_no_repetition():
    assert find_units(nn.Sequential(small_models.Block(8), small_models.Block(16))).names == ["root"]


def test_one_block_object_in_two_places_is_one_unit():
    block = small_models.Block()
    assert find_units(nn.Sequential(block, small_models.Block(), block)).names == ["root", "0", "1"]


def test_classes_by_name():
    model = small_models.Chain(2)
    assert find_units(model, ["Block"]).names == ["root", "blocks.0", "blocks.1"]
    nested = find_units(model, ["Block", "LayerNorm"])
    assert nested.names == ["root", "blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm"]
    assert nested.unit_of_parameters()["blocks.1.norm.bias"] == 4
    assert nested.unit_of_parameters()["blocks.1.up.bias"] == 3
    with pytest.raises(ConfigError, match="no module of class 'Blok'; did you mean 'Block'"):
        find_units(model, ["Blok"])
    with pytest.raises(ConfigError, match="no module of class 'Zebra'; it has Block, Chain"):
        find_units(model, ["Zebra"])


def test_modules_without_parameters_are_no_units():
    assert find_units(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)), ["ReLU"]).names == ["root"]
