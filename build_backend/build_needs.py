"""What a build needs of the machine, looked for before CMake is asked, whose own words name no cure."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMPILERS = ("c++", "g++", "clang++", "CC", "icpx", "icx")  # of those that CMake looks for without CXX
_NAMES_OTHERS = ("CMAKE_ARGS", "CMAKE_TOOLCHAIN_FILE", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")


def expect_compiler(config_settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Expect a C++ compiler; what options of CMake may name is left to CMake."""
    if any(name in environ for name in _NAMES_OTHERS) or any("cmake." in key for key in config_settings):
        return
    asked = next(iter(shlex.split(environ.get("CXX", ""))), None)  # without options
    path = environ.get("PATH")
    if asked and not shutil.which(asked, path=path):
        raise SystemExit(
            f"zerobench: CXX names the compiler '{asked}', which was not found; correct or unset it."
        )
    if not asked and not any(shutil.which(name, path=path) for name in _COMPILERS):
        raise SystemExit(
            "zerobench: no C++ compiler was found; install one (Debian, Ubuntu: `apt install g++`) or name it in CXX."
        )


def expect_writable(folder: str, *, root: Path) -> None:
    """Expect a place for the build folder, which is named from the folder ``root``."""
    place = root / folder
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise SystemExit(
            f"zerobench: the build's files cannot be written into {place}; copy the source to a folder of your own, or "
            "name another for them: `pip install . -C build-dir=FOLDER`."
        )
