"""The committed stubs of the C++ modules name what the built modules have."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import zerobench
from zerobench import _native, errors

torch = pytest.importorskip("torch")


def _stub_names(module: str) -> dict[str, set[str]]:
    """Members by class name in the module's stub; module-level names under the empty string."""
    text = (Path(zerobench.__file__).parent / f"{module}.pyi").read_text(encoding="utf-8")
    names: dict[str, set[str]] = {"": set()}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            names[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
    return names


def _module_names(module: ModuleType) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {"": {name for name in vars(module) if not name.startswith("_")}}
    for name in names[""]:
        value = getattr(module, name)
        if isinstance(value, type):
            names[name] = {key for key in vars(value) if not key.startswith("_")}
            if "__init__" in vars(value):
                names[name].add("__init__")
    return names


@pytest.mark.parametrize("name", ["_core", "_cuda"])
def test_stubs_match_the_module(name: str) -> None:
    try:
        module = _native.load() if name == "_core" else _native.load_cuda()
    except errors.Error as error:
        pytest.skip(str(error))
    stub, built = _stub_names(name), _module_names(module)
    assert stub[""] == built[""]
    for owner in sorted(built):
        # pybind11 gives every class an __init__; the stub shows those that can be called.
        assert stub.get(owner, set()) - {"__init__"} == built[owner] - {"__init__"}, owner
