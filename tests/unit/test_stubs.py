"""The committed stubs of the C++ core name what the built core has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zerobench

torch = pytest.importorskip("torch")


def _stub_names() -> dict[str, set[str]]:
    """Members by class name in ``_core.pyi``; module-level names under the empty string."""
    text = (Path(zerobench.__file__).parent / "_core.pyi").read_text(encoding="utf-8")
    names: dict[str, set[str]] = {"": set()}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            names[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
    return names


def _core_names() -> dict[str, set[str]]:
    from zerobench import _native

    core = _native.load()
    names: dict[str, set[str]] = {"": {name for name in vars(core) if not name.startswith("_")}}
    for name in names[""]:
        value = getattr(core, name)
        if isinstance(value, type):
            names[name] = {key for key in vars(value) if not key.startswith("_")}
            if "__init__" in vars(value):
                names[name].add("__init__")
    return names


def test_stubs_match_the_core() -> None:
    stub, core = _stub_names(), _core_names()
    assert stub[""] == core[""]
    for name in sorted(core):
        # pybind11 gives every class an __init__; the stub shows those that can be called.
        assert stub.get(name, set()) - {"__init__"} == core[name] - {"__init__"}, name
