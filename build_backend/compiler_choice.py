"""Which C++ compiler a kept build folder goes on with."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path


def forget_other_compiler(folder: Path, environ: Mapping[str, str]) -> None:
    """Forget a compiler that CXX does not name: CMake reads CXX in an empty folder only, and would go on with the
    compiler of the first build."""
    cache = folder / "CMakeCache.txt"
    asked = next(iter(shlex.split(environ.get("CXX", ""))), "")  # without options
    if not asked or not cache.is_file():
        return
    entries = (line.partition("=") for line in cache.read_text(encoding="utf-8").splitlines())
    used = next((value for name, _, value in entries if name.startswith("CMAKE_CXX_COMPILER:")), asked)
    if os.path.realpath(shutil.which(asked) or asked) != os.path.realpath(shutil.which(used) or used):
        cache.unlink()
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
