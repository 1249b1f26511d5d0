"""PEP 517 backend: scikit-build-core, plus the choice of torch (docs/reference/building.md).

With torch in the target environment the build uses that one and brings none; with none the build environment is given
the newest tested torch, and the wheel requires the same minor.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

try:
    import scikit_build_core
    import scikit_build_core.build as backend
except ModuleNotFoundError:
    raise SystemExit(
        "zerobench: building without isolation needs scikit-build-core in the environment; "
        "run `pip install scikit-build-core cmake ninja` first."
    ) from None

from build_needs import expect_compiler, expect_writable
from compiler_choice import forget_other_compiler
from cuda_requirement import build_requirements, cmake_defines, toolkit_nvcc
from torch_requirement import NEWEST_TESTED, installed_torch, newer_warning, torch_to_build_against

ConfigSettings = dict[str, Any]

build_sdist = backend.build_sdist
get_requires_for_build_sdist = backend.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = backend.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    return [*backend.get_requires_for_build_wheel(config_settings), *_requirements()]


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    return [*backend.get_requires_for_build_editable(config_settings), *_requirements()]


def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings | None = None, metadata_directory: str | None = None
) -> str:
    _prepare(config_settings or {})
    return backend.build_wheel(wheel_directory, _with_defines(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: ConfigSettings | None = None, metadata_directory: str | None = None
) -> str:
    _prepare(config_settings or {})
    return backend.build_editable(wheel_directory, _with_defines(config_settings), metadata_directory)


def _requirements() -> list[str]:
    torch = installed_torch()
    return [*([] if torch else [NEWEST_TESTED]), *build_requirements(torch, toolkit_nvcc())]


def _with_defines(config_settings: ConfigSettings | None) -> ConfigSettings:
    """CMake is told where everything is, as it sees neither the isolated environment's path nor the target's."""
    torch = torch_to_build_against()
    if (warning := newer_warning(torch)) is not None:
        print(warning, file=sys.stderr)
    defines = {"ZEROBENCH_TORCH_DIR": str(torch.directory), **cmake_defines()}
    settings = {f"cmake.define.{name}": value for name, value in defines.items()}
    return {**settings, **(config_settings or {})}


def _prepare(config_settings: ConfigSettings) -> None:
    folder = str(config_settings.get("build-dir", "build/*"))
    expect_compiler(config_settings, os.environ)
    expect_writable(folder, root=Path.cwd())
    _keep_build_folder(folder)


def _keep_build_folder(folder: str) -> None:
    """Makes a second build compile only what changed.

    scikit-build-core empties a build folder whose record names another place of scikit-build-core, as every isolated
    environment has. Ours holds nothing of that environment that is not passed again (torch, nvcc, NCCL, Python).
    """
    here = os.fspath(Path(scikit_build_core.__file__).parent.absolute())
    pattern = Path(folder, ".skbuild-info.json")
    root = Path(pattern.anchor)
    for record in root.glob(os.fspath(pattern.relative_to(root))):
        try:
            facts = json.loads(record.read_text(encoding="utf-8"))
        except ValueError:  # an interrupted build; scikit-build-core empties the folder then
            continue
        forget_other_compiler(record.parent, os.environ)
        if isinstance(facts, dict) and facts.get("skbuild_version") == scikit_build_core.__version__:
            record.write_text(json.dumps({**facts, "skbuild_path": here}), encoding="utf-8")
