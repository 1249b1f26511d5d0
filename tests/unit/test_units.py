"""Which modules become units, and which unit a parameter belongs to."""

from __future__ import annotations

import pytest
import small_models
from builders import tiny_model
from torch import nn

from zerobench.engine.units import find_units, large_unit_notice
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
    outer = nn.ModuleList(nn.Sequential(*(small_models.Block() for _ in range(2))) for _ in range(4))
    assert find_units(outer).names == ["root", "0", "1", "2", "3"]


class Tower(nn.Module):
    """An embedding and layers in a list."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 24)
        self.layers = nn.ModuleList(small_models.Block() for _ in range(layers))
        self.norm = nn.LayerNorm(24)

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


class Expert(nn.Sequential):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__(*([nn.LayerNorm(24)] * norm), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))


class ExpertBlock(nn.Module):
    """A norm, a router and experts, of which a forward calls some."""

    def __init__(self, *, experts: int = 8, router: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.router = nn.Linear(24, experts) if router else None
        self.experts = nn.ModuleList(Expert(norm=norm) for _ in range(experts))

    def forward(self, h):
        return h


def layers_of(*towers: str, layers: int = 3) -> list[str]:
    return [f"{tower}.{layer}" for tower in towers for layer in range(layers)]


def test_two_towers_give_way_to_their_layers():
    names = find_units(nn.ModuleDict({"q": Tower(), "c": Tower()})).names
    assert set(names) == {"root", "q.embed", "c.embed", *layers_of("q.layers", "c.layers")}


def test_towers_in_a_list_give_way_to_their_layers():
    stacks = nn.ModuleList(nn.Sequential(*(small_models.Block() for _ in range(3))) for _ in range(2))
    assert find_units(stacks).names == ["root", *layers_of("0", "1")]


def test_children_of_a_sequential_need_no_norm():
    def layer():
        return nn.Sequential(nn.Linear(24, 24), nn.Tanh())

    stacks = nn.ModuleList(nn.Sequential(*(layer() for _ in range(3))) for _ in range(2))
    assert find_units(stacks).names == ["root", *layers_of("0", "1")]


def test_a_tower_that_must_not_be_split_stays_whole():
    towers = nn.ModuleDict({"q": Tower(), "c": Tower()})
    towers._no_split_modules = ["Tower"]
    assert find_units(towers).names == ["root", "q", "c"]


def test_towers_of_a_quarter_of_the_model_stay_whole():
    assert find_units(nn.ModuleList(Tower() for _ in range(4))).names == ["root", "0", "1", "2", "3"]


@pytest.mark.parametrize(("router", "norm"), [(True, False), (True, True), (False, False)])
def test_experts_stay_whole(router, norm):
    blocks = nn.ModuleList(ExpertBlock(router=router, norm=norm) for _ in range(2))
    assert find_units(blocks).names == ["root", "0", "1"]


def test_experts_by_name_stay_whole():
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({name: Expert(norm=True) for name in "abc"})

        def forward(self, h, name):
            return self.experts[name](h)

    assert find_units(nn.ModuleList(ByName() for _ in range(2))).names == ["root", "0", "1"]


def test_layers_of_experts_are_the_units_of_towers():
    towers = nn.ModuleList(nn.Sequential(*(ExpertBlock() for _ in range(3))) for _ in range(2))
    assert find_units(towers).names == ["root", *layers_of("0", "1")]


def test_a_tower_that_would_mostly_go_to_the_root_stays_whole():
    class Wide(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(200, 200)

    assert find_units(nn.ModuleList(Wide() for _ in range(2))).names == ["root", "0", "1"]


MIB = 1 << 18  # elements of float32


@pytest.mark.parametrize(
    ("widths", "element_bytes", "is_told"),
    [
        ([22, 22, 21], 4, True),
        ([22, 22, 21], 2, False),  # too small
        ([22, 21, 21], 4, False),
        ([70, 20], 4, False),  # most of it is one parameter
    ],
)
def test_a_unit_that_makes_gathers_large_is_told(widths, element_bytes, is_told):
    model = nn.Sequential(*(nn.Linear(1, width * MIB, bias=False, device="meta") for width in widths))
    notice = large_unit_notice(find_units(model), element_bytes=element_bytes)
    assert (notice is not None) == is_told
    assert notice is None or notice.startswith("unit 'root' takes 65.0 MiB, 100% of the model")


def test_a_large_unit_of_a_larger_model_is_not_told():
    blocks = [
        nn.Sequential(*(nn.Linear(1, 40 * MIB, bias=False, device="meta") for _ in range(2)))
        for _ in range(4)
    ]
    assert large_unit_notice(find_units(nn.ModuleList(blocks)), element_bytes=4) is None


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


def test_cures_of_embeddings_and_heads_name_the_other_units():
    model = nn.ModuleDict({"embed": nn.Embedding(200, 24), "blocks": small_models.Chain(2).blocks})
    cures = find_units(model).cures()
    assert cures[0] == cures[2] == cures[3] == ""
    assert cures[1].startswith('set "units": ["Block"] in the configuration')


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
