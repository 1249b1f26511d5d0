"""The catalogue of strategies: its rows agree with the classes, and nothing else compares names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from plan_samples import GPUS, ON_GPUS, configuration, why_too_large

from zerobench import strategies
from zerobench.bench.jobs import reference_strategy
from zerobench.bench.plan import fit
from zerobench.bench.swap.plan import may_swap
from zerobench.errors import ConfigError
from zerobench.strategies import base, catalogue
from zerobench.strategies.catalogue import CATALOGUE, PARTS, Facts
from zerobench.strategies.ddp import DDPStrategy

PACKAGE = Path(__file__).parents[2] / "python/zerobench"
CATALOGUE_FILE = PACKAGE / "strategies/catalogue.py"
STUDY_FILE = PACKAGE / "recipes" / "slow_network_study.py"  # claims of a study about strategies that it names
OURS = ("zero0", "zero1", "zero2", "zero3")
DEEPSPEED = ("deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3_leaves", "deepspeed3_super")
DEEPCOMPILE = ("deepcompile3", "deepcompile3_prefetch", "deepcompile3_selective", "deepcompile3_both")
MEGATRON = ("mfsdp1", "mfsdp2", "mfsdp3")

# What a name begins with, without its stage and variant.
FAMILIES = sorted({re.match(r"[a-z]+(_only)?", name)[0] for name in CATALOGUE}, key=len, reverse=True)
FAMILY = "|".join(FAMILIES)
# A family as a name begins with it, but not the words zerobench and zero_optimization, or a bare word of a sentence.
BEGINS_AS_A_FAMILY = re.compile(rf"(?:\W|^)(?:{FAMILY})(?![a-z])(?!_optimization)")
FEWEST_LETTERS = 3  # of a shorter beginning nobody knows what it begins
PATTERN_CALLS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition",
    "compile", "match", "fullmatch", "search", "findall", "sub", "fnmatch",
}  # fmt: skip


def names_in(source: str, *, are_classes_of_strategies: bool = False) -> list[tuple[int, str]]:
    """Return the lines that know a strategy by its name, each with what it knows. ``are_classes_of_strategies`` allows
    ``name = "..."`` in a class, by which the class gets its name."""
    tree = ast.parse(source)
    allowed = {id(value) for value in class_names(tree)} if are_classes_of_strategies else set()
    return [
        (part.lineno, part.value)
        for node in ast.walk(tree)
        for part in (*whole_names(node), *patterns(node), *beginnings(node))
        if id(part) not in allowed
    ]


def whole_names(node: ast.AST) -> Iterator[ast.Constant]:
    if isinstance(node, ast.Constant) and node.value in CATALOGUE:
        yield node


def patterns(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield what a name is tested to begin with, to match or to contain."""
    if isinstance(node, ast.Call) and called(node) in PATTERN_CALLS:
        yield from (text for each in node.args for text in texts(each) if is_of_a_family(text.value))
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield from (text for text in texts(node.left) if text.value in FAMILIES)


def is_of_a_family(text: str) -> bool:
    begins_one = len(text) >= FEWEST_LETTERS and any(family.startswith(text) for family in FAMILIES)
    return begins_one or bool(BEGINS_AS_A_FAMILY.search(text))


def beginnings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield what a name is put together from, such as the zero of ``f"zero{stage}"``."""
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    for part, following in pairwise(parts):
        if isinstance(part, ast.Constant) and isinstance(following, ast.FormattedValue):
            yield from [part] if re.fullmatch(FAMILY, part.value) else []


def class_names(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "name":
                yield statement.value


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def texts(node: ast.AST) -> Iterator[ast.Constant]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner


def test_no_other_file_knows_strategies_by_their_names() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path in (CATALOGUE_FILE, STUDY_FILE):
            continue
        of_classes = path.is_relative_to(PACKAGE / "strategies")
        for line, text in names_in(path.read_text(encoding="utf-8"), are_classes_of_strategies=of_classes):
            found.append(f"{path.relative_to(PACKAGE)}:{line} knows a strategy by its name: {text!r}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'strategy == "ddp"',
        'row.strategy not in ("zero2", OTHER)',
        'class A:\n    name: str = "single"',
        'class A:\n    other = "single"',
        'strategy.startswith("zero")',
        'strategy.startswith("deep")',
        'strategy.startswith(("fsdp", "x"))',
        '"deepcompile" in strategy',
        're.compile(r"(?:zero|deepspeed)([0-3])")',
        're.fullmatch(rf"mfsdp\\d{more}", strategy)',
        'f"zero{stage}"',
        'name.removeprefix("zero")',
    ],
)
def test_a_name_outside_the_catalogue_is_found(source: str) -> None:
    assert names_in(f"import re\n{source}", are_classes_of_strategies=True)


@pytest.mark.parametrize(
    "source",
    [
        '"use deepspeed3, or remove it"',
        'class A:\n    name = "zero0"',
        'path.startswith("zerobench-")',
        'values.get("zero_optimization")',
        'f"{what} deepspeed {why}"',
    ],
)
def test_other_texts_are_no_names(source: str) -> None:
    assert not names_in(source, are_classes_of_strategies=True)


def test_only_classes_of_strategies_may_have_a_name() -> None:
    assert names_in('class A:\n    name = "zero0"') == [(2, "zero0")]


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=lambda row: row.name)
def test_a_row_agrees_with_its_class(row: catalogue.BuiltIn) -> None:
    found = strategies.get(row.name)
    assert f"{found.__module__}:{found.__name__}" == row.place
    assert (found.name, found.stage) == (row.name, row.stage)
    assert found.updates is not row.is_floor


KNOWN = (
    "single", *OURS, "compute_only", "ddp", "ddp_compress", "ddp_master", "fsdp1", "fsdp2", "fsdp2_keep", *DEEPSPEED,
    *DEEPCOMPILE, *MEGATRON,
)  # fmt: skip


def names_where(fact: str, *, among: Iterable[str] = CATALOGUE) -> tuple[str, ...]:
    return tuple(name for name in CATALOGUE if name in among and getattr(CATALOGUE[name], fact))


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        ("is_ours", OURS),
        ("is_reference", ("single",)),
        ("is_floor", ("compute_only",)),
        ("autocast", ("ddp", "ddp_compress")),
        ("begins_whole", ("fsdp1", *DEEPSPEED, *DEEPCOMPILE, *MEGATRON)),
        ("compiles_whole", DEEPCOMPILE),
        ("in_backward_unless_clipped", ("deepspeed3_super",)),
        ("nvme_offloads", ("zero1", "zero2", "zero3", "deepspeed3")),
        ("package", (*DEEPSPEED, *DEEPCOMPILE, *MEGATRON)),
        ("whole_logits", KNOWN),
        (
            "replicates",
            ("single", "zero0", "compute_only", "ddp", "ddp_compress", "ddp_master", "deepspeed0"),
        ),
    ],
)
def test_a_fact_holds_for_these_strategies(fact: str, names: tuple[str, ...]) -> None:
    assert names_where(fact, among=KNOWN) == names


def test_every_built_in_strategy_shards_or_replicates() -> None:
    assert {*names_where("shards")} ^ {*names_where("replicates")} == {*CATALOGUE}


def test_stages() -> None:
    assert {name: row.stage for name, row in CATALOGUE.items() if row.stage is not None} == {
        "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3,
        "fsdp1": 3, "fsdp2": 3, "fsdp2_keep": 2,
        "deepspeed0": 0, "deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3,
        "deepspeed3_leaves": 3, "deepspeed3_super": 3,
        "deepcompile3": 3, "deepcompile3_prefetch": 3, "deepcompile3_selective": 3, "deepcompile3_both": 3,
        "mfsdp1": 1, "mfsdp2": 2, "mfsdp3": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "divided"), [(0, ()), (1, PARTS[2:]), (2, PARTS[1:]), (3, PARTS)], ids=lambda value: str(value)
)
def test_a_stage_divides_these_parts(stage: int, divided: tuple[catalogue.Part, ...]) -> None:
    facts = Facts(stage=stage)
    assert tuple(part for part in PARTS if facts.divides(part)) == divided


def test_defaults_of_each_device() -> None:
    assert [row.name for row in catalogue.default_strategies("cpu")] == ["single", *OURS, "ddp", "fsdp2"]
    assert [row.name for row in catalogue.default_strategies("cuda")] == [
        "compute_only", *OURS, "ddp", "ddp_compress", "ddp_master", "fsdp1", "fsdp2", "fsdp2_keep",
        "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3_leaves", *MEGATRON,
    ]  # fmt: skip


def test_names_derived_from_the_rows() -> None:
    assert catalogue.DEFAULT_BASELINES == ("ddp", "ddp_master", "single")
    assert (catalogue.OURS, catalogue.REFERENCE, catalogue.FLOOR) == (OURS, "single", "compute_only")
    assert [catalogue.ours_at(stage) for stage in range(4)] == list(OURS)
    assert [catalogue.short_name(name) for name in ("zero2", "fsdp2_keep", "mine.of:TheClass")] == [
        "zs2",
        "fsdp2_keep",
        "theclass",
    ]
    plain = [catalogue.of_deepspeed_file("plain", stage=stage) for stage in range(4)]
    assert plain == ["deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3"]
    assert catalogue.of_deepspeed_file("super_offload", stage=2) == "deepspeed3_super"
    assert catalogue.of_deepspeed_file("deepcompile", stage=3) == "deepcompile3_both"


def test_the_offloads_to_nvme_are_those_of_the_protocol() -> None:
    assert catalogue.OWN.nvme_offloads == base.NVME_OFFLOADS


class Silent(DDPStrategy):
    """Declares nothing, whatever the class that it derives from does."""

    name = "silent"


class Declared(DDPStrategy):
    name = "declared"
    facts = Facts(
        stage=1,
        begins_whole=True,
        compiles_whole=True,
        in_backward_unless_clipped=True,
        nvme_offloads=("nvme",),
        whole_logits=True,
    )


class Autocast(DDPStrategy):
    name = "autocast"
    facts = Facts(autocast=True, whole=PARTS)


class Mistaken(DDPStrategy):
    name = "mistaken"
    facts = "stage 3"


SILENT, DECLARED, AUTOCAST = (f"test_catalogue:{each.__name__}" for each in (Silent, Declared, Autocast))
SMALL_GPUS = [gpu.model_copy(update={"total_bytes": 1 << 19}) for gpu in GPUS]


def why_not_on_small_gpus(strategy: str) -> str:
    found = why_too_large(configuration(**ON_GPUS, strategies=(strategy,)), gpus=SMALL_GPUS)
    return found.reason if found else ""


def test_the_plan_follows_what_a_strategy_of_ones_own_declares() -> None:
    row = configuration(strategies=(DECLARED,))
    assert row.stage == 1
    zero1 = configuration(strategies=("zero1",), optimizer_in_backward=(True,))
    assert fit.least_rank_bytes(row) == fit.least_rank_bytes(zero1)
    assert row.settings.compile == "whole" and row.settings.optimizer_in_backward
    assert not configuration(strategies=(DECLARED,), clip=(1.0,)).settings.optimizer_in_backward
    assert fit.logits_bytes(row) == fit.logits_bytes(zero1) > 0
    assert "begins with the whole fp32 model" in why_not_on_small_gpus(DECLARED)


def test_nothing_is_known_of_a_strategy_of_ones_own_that_declares_nothing() -> None:
    row = configuration(strategies=(SILENT,))
    assert row.stage is None and strategies.facts(SILENT) == catalogue.known_facts(SILENT) == catalogue.OWN
    assert fit.least_rank_bytes(row) == fit.least_rank_bytes(configuration(strategies=("zero3",)))
    assert (row.settings.compile, row.settings.optimizer_in_backward) == ("none", False)
    assert fit.logits_bytes(row) == 0
    assert "begins with the whole fp32 model" not in why_not_on_small_gpus(SILENT)


def test_a_strategy_of_ones_own_under_autocast_is_held_against_a_reference_under_autocast() -> None:
    rows = {
        name: configuration(strategies=(name,), precision=("bf16",))
        for name in (SILENT, AUTOCAST, "ddp", "zero0")
    }
    assert (
        reference_strategy(rows[AUTOCAST]) == reference_strategy(rows["ddp"]) == catalogue.AUTOCAST_REFERENCE
    )
    assert reference_strategy(rows[SILENT]) == reference_strategy(rows["zero0"]) == "single"
    assert rows[AUTOCAST].reference_group() == rows["ddp"].reference_group()
    assert fit.least_rank_bytes(rows[AUTOCAST]) == fit.least_rank_bytes(rows["ddp"])


def test_a_strategy_of_ones_own_swaps_where_it_declares_so(tmp_path) -> None:
    def swaps(strategy: str, offload: str) -> bool:
        return may_swap(configuration(strategies=(strategy,), offload=(offload,), nvme_paths=(tmp_path,)))

    assert [swaps(DECLARED, offload) for offload in base.NVME_OFFLOADS] == [True, False]
    assert [swaps(SILENT, offload) for offload in base.NVME_OFFLOADS] == [True, True]


def test_facts_of_another_kind_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"facts is a str: make it a zerobench\.strategies\.catalogue\.Facts"
    ):
        configuration(strategies=("test_catalogue:Mistaken",))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stage": 4}, "stage=4 is unknown: ZeRO stages are 0, 1, 2 and 3"),
        ({"whole": ("moments",)}, "'moments'"),
    ],
)
def test_facts_that_cannot_be_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Facts(**wrong)
