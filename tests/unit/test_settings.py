"""The table of settings: it says everything of each, what is derived from it, and nobody keeps a list beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from plan_samples import configuration

from zerobench.bench.plan.options import CompareOptions, default_of
from zerobench.bench.plan.plan import make_plan
from zerobench.cli.compare import compare
from zerobench.report.advice.no_gain import SHARDING_POINT
from zerobench.results.comparing import BASELINE_POINT, FLOOR_POINT, PLAIN_POINT
from zerobench.results.rows import WORKLOAD_KEYS
from zerobench.results.settings import (
    AS_THE_ROW,
    OPTIONS,
    SETTINGS,
    Changes,
    axes,
    flag_of,
    named_settings,
    reference_values,
    settings_that_change,
)
from zerobench.strategies.base import OptimizerSettings

PACKAGE = Path(__file__).parents[2] / "python/zerobench"
TABLE = PACKAGE / "results/settings.py"
NAMES = SETTINGS.keys() | OPTIONS.keys()
MOST_NAMES = 3  # that a list may hold and be about something else than all settings


def fields_without_a_line(source: str) -> list[str]:
    """Return the fields of the table's classes that no Setting or Option describes."""
    kinds = {"Settings": "Setting", "Options": "Option"}
    found = []
    for node in ast.parse(source).body:
        for field in node.body if isinstance(node, ast.ClassDef) and node.name in kinds else ():
            if not isinstance(field, ast.AnnAssign):
                continue
            calls = [call for call in ast.walk(field.annotation) if isinstance(call, ast.Call)]
            if kinds[node.name] not in map(ast.unparse, (call.func for call in calls)):
                found.append(ast.unparse(field.target))
    return found


def kept_lists(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line and names of each literal list, tuple, set, or dict of literal values, that names many settings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = node.keys if all(map(is_literal, node.values)) else []
        else:
            continue
        names = [item.value for item in items if isinstance(item, ast.Constant) and item.value in NAMES]
        if len(names) > MOST_NAMES:
            yield node.lineno, names


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def test_every_field_has_a_line() -> None:
    assert fields_without_a_line(TABLE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("field", ["made_up: bool = False", "made_up: Annotated[bool, Field(ge=1)] = False"])
def test_a_field_without_a_line_is_found(field: str) -> None:
    source = f"class Settings:\n    seed: Annotated[int, Setting(changes=Changes.RESULT)] = 0\n    {field}\n"
    assert fields_without_a_line(source) == ["made_up"]


def test_nobody_keeps_a_list_of_settings_beside_the_table() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {', '.join(names)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != TABLE
        for line, names in kept_lists(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ["('clip', 'checkpointing', 'seed', 'data')", "{'clip': 1, 'checkpointing': 2, 'seed': 3, 'data': 4}"],
)
def test_a_kept_list_is_found(source: str) -> None:
    assert list(kept_lists(f"KEPT = {source}"))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (WORKLOAD_KEYS, {"model", "seq_length", "precision", "data"}),
        (BASELINE_POINT, {"clip", "checkpointing"}),
        (
            FLOOR_POINT,
            {"batch_size", "grad_accum", "checkpointing", "compile", "attention", "dropout", "tf32"},
        ),
        (PLAIN_POINT, {*FLOOR_POINT, "world_size", "clip"}),
        (SHARDING_POINT, {*PLAIN_POINT, "offload", "offload_ratio", "optimizer_in_backward"}),
        (
            settings_that_change(Changes.RESULT),
            {
                "model_config_resolved", "precision", "batch_size", "seq_length", "clip", "data", "seed", "optimizer",
                "device", "tf32",
            },
        ),
        (settings_that_change(Changes.BITS), {"world_size", "checkpointing", "compile"}),
    ],
)  # fmt: skip
def test_rows_are_held_against_rows_with_equal_settings(found: tuple[str, ...], expected: set[str]) -> None:
    assert set(found) >= expected


def test_the_reference_runs_without_what_must_not_change_a_result() -> None:
    expected = {
        "checkpointing": False,
        "compile": "none",
        "offload": "none",
        "offload_ratio": None,
        "nvme_paths": [],
        "host_memory_gib": None,
        "device_memory_gib": None,
        "optimizer_in_backward": False,
        "bind": "none",
    }
    assert reference_values().items() >= expected.items()


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_changes_the_result_or_the_reference_runs_without_it(key: str) -> None:
    """An option that is neither would be verified against a reference that ran with the same fault."""
    setting = SETTINGS[key]
    neither = {
        "model",
        "world_size",
        "grad_accum",
    }  # by way of others: the model's fields, micro-batches of a step
    measures = setting.option is None or setting.changes == Changes.NOTHING
    ours_alone = {"communicator"}
    if measures or setting.option.is_of_model or key in neither | ours_alone:
        assert setting.reference is AS_THE_ROW
    else:
        assert bool(setting.changes & Changes.RESULT) == (setting.reference is AS_THE_ROW)


@pytest.mark.parametrize(
    "places",
    [
        [option.help_at for option in OPTIONS.values()],
        [OPTIONS[key].grid_at for key in axes()],
        [SETTINGS[key].name_at for key in named_settings()],
    ],
    ids=["help", "grid", "name"],
)
def test_no_two_settings_have_the_same_place(places: list[int]) -> None:
    assert len(set(places)) == len(places)


def test_strategies_are_innermost() -> None:
    assert axes()[-1] == "strategies"


def test_the_command_has_every_option() -> None:
    parameters = compare.__signature__.parameters  # type: ignore[attr-defined]
    assert list(parameters) == ["context", *OPTIONS]


@pytest.mark.parametrize("key", OPTIONS)
def test_every_option_has_a_default_on_both_devices(key: str) -> None:
    assert [default_of(key, device) for device in ("cpu", "cuda")]


def test_strategies_of_a_script_learn_at_the_rate_of_a_comparison() -> None:
    assert OptimizerSettings().lr == OPTIONS["lr"].default


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="made_up"):
        CompareOptions(made_up=1)


def test_a_row_has_what_was_asked_for() -> None:
    asked = {
        "seed": 7,
        "num_steps": 3,
        "repeats": 2,
        "bind": "numa",
        "checkpointing": True,
        "device_memory_gib": 2.0,
    }
    settings = configuration(**asked).settings
    assert {key: getattr(settings, key) for key in asked} == asked


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if option.above_zero])
def test_a_size_must_be_above_zero(key: str) -> None:
    value = (0,) if key in axes() else 0
    with pytest.raises(Exception, match=re.escape(f"{flag_of(key)} 0 is not valid")):
        make_plan(CompareOptions(strategies=("zero1",), **{key: value}))
