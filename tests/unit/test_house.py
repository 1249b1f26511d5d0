"""Who may include and import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
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
CUDA_FILES = re.compile(r".*\.cu|\w+/(cuda|nccl)_\w+\.(cpp|h)|kernels/fill\.h")

# A folder of python/zerobench imports itself and folders above it in this list. Modules at the package's root, and
# those directly in bench/, count as folders of their own.
PYTHON_ORDER = [
    "errors",
    "_build_info",
    "_core",
    "_cuda",
    "_native",
    "host",
    "engine",
    "data",
    "models",
    "strategies",
    "strategies.deepspeed",
    "results",
    "report",
    "report.advice",
    "page",
    "diff",
    "__init__",  # the package itself, whose names are imported from above when they are first used
    "bench.protocol",
    "bench.plan",
    "bench.swap",
    "bench.rank",
    "bench.launch",
    "bench",
    "trace",
    "recipes",
    "micro",
    "doctor",
    "export",
    "hosts",
    "cli",
    "__main__",
]
# Where the list above says too little: all that these may import of zerobench.
PYTHON_ONLY = {
    "errors": set(),
    "results": {"errors", "strategies.catalogue", "results"},
    "report": {"errors", "host.network", "strategies.catalogue", "results", "report"},
    "report.advice": {"errors", "strategies.catalogue", "results", "report"},
    "page": {"errors", "results", "report", "page"},
    "diff": {"errors", "results", "report", "diff"},
}
AT_THE_ROOT = {"__init__", "__main__", "_native", "errors"}
WITHOUT_TORCH = ["results", "report", "report.advice", "page", "diff"]
LIGHT_IMPORTS = ["", "cli.main", *WITHOUT_TORCH]

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
        return "CUDA is known to .cu files, cuda_* and nccl_* only"
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


def imported_modules(source: str, name: str, is_package: bool, *, of_types: bool = False) -> Iterator[str]:
    """Modules of zerobench that module `name` imports, without the leading `zerobench.`; others as `!torch`.

    `of_types`: also what only type checkers read."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    tree = ast.parse(source)
    for node in ast.walk(tree) if of_types else runtime_nodes(tree):
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


def folder_of(name: str) -> str:
    """Such as `bench.plan` for `bench.plan.names`, and `errors` for what stands at the root."""
    if not name:
        return "__init__"
    return max(
        (folder for folder in PYTHON_ORDER if within(name, {folder})), key=len, default="not in PYTHON_ORDER"
    )


def within(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def import_fault(name: str, imported: str) -> str | None:
    """Return why module `name` may not import `imported`, or None where it may."""
    folder = folder_of(name)
    if imported.startswith("!"):
        if imported == "!torch" and folder in WITHOUT_TORCH:
            return f"{folder} works without torch"
        return None
    if folder in PYTHON_ONLY:
        allowed = PYTHON_ONLY[folder]
        return None if within(imported, allowed) else f"{folder} may import {sorted(allowed)} of zerobench"
    imported_folder = folder_of(imported)
    if PYTHON_ORDER.index(imported_folder) <= PYTHON_ORDER.index(folder):
        return None
    return f"{imported_folder} stands below {folder}"


def python_files() -> list[Path]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_build_info.py"]
    assert len(paths) > 100, "python/zerobench was not found where it is expected"
    return paths


def import_graph(*, of_types: bool = False) -> dict[str, set[str]]:
    """The modules that each module imports, in functions too, and `of_types` what only type checkers read."""
    graph = {}
    for path in python_files():
        name = module_name(path)
        source = path.read_text(encoding="utf-8")
        found = imported_modules(source, name, path.name == "__init__.py", of_types=of_types)
        graph[name] = set(found) - {name}
    return graph


def find_circle(graph: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Return nodes that lead back to the first of them, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def folder_graph(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    folders: dict[str, set[str]] = {}
    for name, imported in graph.items():
        known = {folder_of(other) for other in imported if not other.startswith("!")}
        folders.setdefault(folder_of(name), set()).update(known - {folder_of(name)})
    return folders


def test_only_the_front_door_stands_at_the_root() -> None:
    at_the_root = {path.stem for path in PACKAGE.glob("*.py")} - {"_build_info"}  # made by the build
    assert at_the_root == AT_THE_ROOT


def test_every_folder_is_in_the_order() -> None:
    named = {module_name(path / "__init__.py") for path in PACKAGE.rglob("*/") if any(path.glob("*.py"))}
    assert named - {""} == {
        folder for folder in PYTHON_ORDER if (PACKAGE / folder.replace(".", "/")).is_dir()
    }


def test_python_imports_point_up() -> None:
    faults = []
    for name, modules in import_graph().items():
        faults += [
            f"zerobench.{name} imports {imported.lstrip('!')}: {fault}"
            for imported in sorted(modules)
            if (fault := import_fault(name, imported))
        ]
    assert not faults, "\n".join(faults)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_circle(import_graph()) is None


def test_types_make_no_circle() -> None:
    graph = import_graph(of_types=True)
    del graph[""]  # the package hands on names of all folders
    assert find_circle(graph) is None


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert find_circle(folder_graph(import_graph())) is None


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("engine.config", "from zerobench.models import resolve"),
        ("models.presets", "def f():\n    from zerobench import strategies"),
        ("report.frame", "from zerobench.bench import run"),
        ("report.frame", "from ..host.machine import machine_facts"),
        ("results.rows", "from zerobench.report import words"),
        ("results.rows", "from zerobench.strategies.base import Strategy"),
        ("report.frame", "import torch.nn"),
        ("report.frame", "from zerobench import _core"),
        ("bench.plan.names", "from zerobench.bench.launch import launcher"),
        ("bench.launch.launcher", "from zerobench.bench.run import run_comparison"),
        ("strategies.zero", "import zerobench"),
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
