"""The wheel in an environment that it was not built in (docs/how-to/wheels.md)."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ADDED_BY_PIP = {"INSTALLER", "REQUESTED", "direct_url.json"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that zerobench was installed from, packed again, since compiling one takes minutes."""
    try:
        installed = importlib.metadata.distribution("zerobench")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("zerobench is used from its source tree, so there is no wheel to take")
    files = [
        f for f in installed.files if f.parts[0] != ".." and f.suffix != ".pyc" and f.name not in ADDED_BY_PIP
    ]
    if "zerobench/_native.py" not in map(str, files):
        pytest.skip("zerobench is installed editable, so there is no wheel to take")
    tag = re.search(r"^Tag: (\S+)", installed.read_text("WHEEL"), re.MULTILINE)[1]
    path = tmp_path_factory.mktemp("dist") / f"zerobench-{installed.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file.locate(), file.as_posix())
    return path


def output_of(*command: object) -> str:
    """Return what a command prints; it inherits no PYTHONPATH, which would show it this environment's packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    run = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def second_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment into which pip put the wheel without network; what zerobench requires is this one's."""
    pytest.importorskip("pip")
    path = tmp_path_factory.mktemp("second") / "v"
    venv.create(path, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", path / "bin/python"]
    output_of(*pip, "install", "--no-index", "--no-deps", wheel)
    packages = next(path.glob("lib/python*/site-packages"))
    (packages / "required.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return path


def test_an_installed_wheel_loads_its_core_in_a_second_environment(second_environment: Path) -> None:
    code = "from zerobench import _native; print(_native.load().__file__)"
    core = Path(output_of(second_environment / "bin/python", "-c", code).strip())
    assert core.is_relative_to(second_environment)


def test_an_installed_wheel_brings_the_command(second_environment: Path) -> None:
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    assert f"torch_minor: {minor}\n" in output_of(second_environment / "bin/zerobench", "info")
