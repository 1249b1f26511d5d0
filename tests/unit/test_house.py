"""Who may include and import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python/zerobench"

# A folder of csrc/ includes itself and folders to its left.
CSRC_ORDER = [
    "common",
    "memory",
    "partition",
    "kernels",
    "optim",
    "io",
    "comm",
    "stores",
    "zero",
    "bindings",
]
TORCH_FILES = re.compile(r"comm/c10d[^/]*|zero/torch_[^/]*|bindings/[^/]*")
PYTHON_FILES = re.compile(r"bindings/[^/]*")
CUDA_FILES = re.compile(r".*\.cu|\w+/(cuda|nccl)_\w+\.h|kernels/fill\.h|bindings/cuda_\w+\.(cpp|h)")

# A module of python/zerobench imports its own layer and the layers above it in this list.
PYTHON_ORDER = [
    {
        "cgroups",
        "consoles",
        "cpu_shares",
        "errors",
        "host_identity",
        "interrupts",
        "locked_folder",
        "meeting",
        "numa",
        "swap_watch",
    },
    {"_build_info", "_core", "_cuda"},
    {
        "_native",
        "config",
        "io_settings",
        "topology",
        "trainable_model",
        "units",
        "placement",
        "rank_cpus",
        "parameters",
        "held_tensors",
        "hooks",
        "change_watch",
        "value_watch",
        "gradients",
        "known_parameters",
        "full_state",
        "agreement",
        "launched",
        "process_groups",
    },
    {"engine", "engine_facts", "engine_window", "optimizer"},
    {""},  # the package itself: zerobench.initialize, from the layer that trains
    {"models"},
    {"data"},
    {"strategies"},
    {"cli_values"},
    {"bench"},
    {"report"},
    {"cli", "cli_compare"},
    {"__main__"},
]
# Where the list above says too little: all that these may import of zerobench.
PYTHON_ONLY = {
    "errors": set(),
    "report": {"errors", "bench.result", "report"},
}
# Drawing and tables serve the comparison too, so bench may use the report below it.
PYTHON_ALSO = {"bench": {"report"}}
WITHOUT_TORCH = ["report"]
LIGHT_IMPORTS = ["", "cli", *WITHOUT_TORCH]

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def csrc_files() -> list[Path]:
    files = [path for folder in CSRC_ORDER for path in (CSRC / folder).rglob("*")]
    sources = sorted(path for path in files if path.suffix in {".h", ".cpp", ".cu"})
    assert len(sources) > 20, "csrc/ was not found where it is expected"
    return sources


def includes(path: Path) -> Iterator[tuple[str, bool]]:
    """Each included name, and whether it is one of ours."""
    for ours, system in INCLUDE.findall(path.read_text(encoding="utf-8")):
        yield (ours or system), bool(ours)


def include_faults(name: str, included: str, is_ours: bool) -> str | None:
    """Why file `name` (relative to csrc/) may not include `included`; None where it may."""
    if is_ours:
        folder = included.split("/")[0]
        if folder not in CSRC_ORDER or "/" not in included:
            return "names no folder of csrc/"
        if CSRC_ORDER.index(folder) > CSRC_ORDER.index(name.split("/")[0]):
            return f"{folder}/ stands to the right"
        if (
            TORCH_FILES.fullmatch(included)
            and re.search(r"/torch_", included)
            and not TORCH_FILES.fullmatch(name)
        ):
            return "brings torch where it is not known"
        if CUDA_FILES.fullmatch(included) and not CUDA_FILES.fullmatch(name):
            return "brings CUDA into what is built without it"
        return None
    top = included.split("/")[0]
    if top in {"torch", "ATen", "c10"} and not TORCH_FILES.fullmatch(name):
        return "torch is known to comm/c10d*, zero/torch_* and bindings/ only"
    if top in {"pybind11", "Python.h"} and not PYTHON_FILES.fullmatch(name):
        return "Python is known to bindings/ only"
    if re.match(r"(cuda|nccl)[\w/]*\.h", included) and not CUDA_FILES.fullmatch(name):
        return "CUDA is known to .cu files and the CUDA module only"
    return None


def test_csrc_includes_point_left() -> None:
    faults = []
    for path in csrc_files():
        name = path.relative_to(CSRC).as_posix()
        for included, is_ours in includes(path):
            if fault := include_faults(name, included, is_ours):
                faults.append(f"{name} includes {included}: {fault}")
            if is_ours and not (CSRC / included).is_file():
                faults.append(f"{name} includes {included}: no such file")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "included", "is_ours"),
    [
        ("memory/ledger.cpp", "optim/adam.h", True),
        ("common/error.h", "error.h", True),
        ("zero/engine.cpp", "zero/torch_hooks.h", True),
        ("zero/engine.cpp", "ATen/ATen.h", False),
        ("comm/shm_queue.cpp", "c10/core/Allocator.h", False),
        ("zero/torch_hooks.cpp", "pybind11/pybind11.h", False),
        ("kernels/cpu_kernels.cpp", "cuda_runtime.h", False),
        ("kernels/cpu_kernels.cpp", "kernels/fill.h", True),
    ],
)
def test_include_in_the_wrong_direction_is_found(name: str, included: str, is_ours: bool) -> None:
    assert include_faults(name, included, is_ours)


def test_every_folder_of_csrc_is_in_the_order() -> None:
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()}
    assert folders - {"tests"} == set(CSRC_ORDER)


def module_name(path: Path) -> str:
    """`bench.result` for python/zerobench/results/schema.py; the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, in functions too, but for what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and is_type_checking(node):
            yield from (
                inner for statement in node.orelse for inner in [statement, *runtime_nodes(statement)]
            )
        else:
            yield node
            yield from runtime_nodes(node)


def is_module(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    if name in {"_build_info", "_core", "_cuda"}:
        return True  # made by the build
    return (
        (path / "__init__.py").is_file()
        or path.with_suffix(".py").is_file()
        or path.with_suffix(".pyi").is_file()
    )


def imported_modules(source: str, name: str, is_package: bool) -> Iterator[str]:
    """Modules of zerobench that module `name` imports, without the leading `zerobench.`; others as `!torch`."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from resolve(alias.name, [])
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["zerobench", *package][: len(package) + 2 - node.level]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield from resolve(base, [alias.name for alias in node.names])


def resolve(module: str, names: list[str]) -> Iterator[str]:
    top, _, rest = module.partition(".")
    if top != "zerobench":
        yield f"!{top}"
        return
    submodules = [".".join(filter(None, [rest, name])) for name in names]
    found = [submodule for submodule in submodules if is_module(submodule)]
    yield from found
    if len(found) < max(len(names), 1):
        yield rest


def layer(name: str) -> int:
    top = name.split(".")[0]
    for index, names in enumerate(PYTHON_ORDER):
        if top in names:
            return index
    raise AssertionError(f"zerobench.{name} has no place in PYTHON_ORDER")


def within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def import_fault(name: str, imported: str) -> str | None:
    """Why module `name` may not import `imported`; None where it may."""
    top = name.split(".")[0]
    if imported.startswith("!"):
        foreign = imported[1:]
        if foreign == "torch" and top in WITHOUT_TORCH:
            return f"{top} works without torch"
        return None
    if top in PYTHON_ONLY:
        allowed = PYTHON_ONLY[top]
        return (
            None
            if within(imported, allowed)
            else f"{top} may import {sorted(allowed) or 'nothing'} of zerobench"
        )
    if within(imported, PYTHON_ALSO.get(top, set())):
        return None
    return None if layer(imported) <= layer(name) else f"{imported} stands below {top or 'zerobench'}"


def test_every_module_of_the_order_is_there() -> None:
    assert [name for names in PYTHON_ORDER for name in sorted(names) if not is_module(name)] == []


def test_python_imports_point_up() -> None:
    faults = []
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_build_info.py"]
    assert len(paths) > 10
    for path in paths:
        name = module_name(path)
        layer(name)
        source = path.read_text(encoding="utf-8")
        for imported in imported_modules(source, name, path.name == "__init__.py"):
            if fault := import_fault(name, imported):
                faults.append(f"zerobench.{name} imports {imported.lstrip('!')}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("config", "from zerobench.engine.engine import Engine"),
        ("models.presets", "def f():\n    from zerobench import strategies"),
        ("report.frame", "from zerobench.bench import run"),
        ("report.frame", "from ..bench.machine import machine_facts"),
        ("report.frame", "import torch.nn"),
        ("report.frame", "from zerobench import _core"),
        ("errors", "from . import config"),
    ],
)
def test_import_in_the_wrong_direction_is_found(name: str, source: str) -> None:
    assert any(import_fault(name, imported) for imported in imported_modules(source, name, False))


@pytest.mark.parametrize("name", LIGHT_IMPORTS)
def test_import_loads_neither_torch_nor_the_core(name: str) -> None:
    """In a process of its own: what import loads by way of others is not seen in the source."""
    module = ".".join(filter(None, ["zerobench", name]))
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert not {"torch", "zerobench._core", "zerobench._cuda"} & set(run.stdout.split())


def test_the_package_alone_has_what_reads_results() -> None:
    code = "import sys, zerobench; zerobench.report.load, zerobench.models.resolve; assert 'torch' not in sys.modules"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr


def test_command_help_loads_no_torch() -> None:
    """The interpreter's own list of imports, since the command does not return to a caller."""
    command = [sys.executable, "-X", "importtime", "-m", "zerobench", "compare", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    imported = {
        line.rsplit("|", 1)[1].strip() for line in run.stderr.splitlines() if line.startswith("import time:")
    }
    assert "zerobench.cli.main" in imported
    assert not {"torch", "zerobench._core", "zerobench._cuda"} & imported


def test_what_says_that_it_imports_no_torch_imports_none() -> None:
    said = []
    for path in sorted(PACKAGE.rglob("*.py")):
        words = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
        if re.search(r"[Ii]mport(s|ing this imports) (no|neither) torch", words):
            said.append("zerobench." + module_name(path))
    assert len(said) > 30
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    run = subprocess.run([sys.executable, "-c", code, *said], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
