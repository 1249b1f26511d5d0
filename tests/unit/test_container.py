"""The steps of the Dockerfile are those that are tested elsewhere, so that they hold without Docker."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Return the name and the text of each instruction of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines) if name]


def all_of(name: str) -> list[str]:
    return [text for found, text in instructions() if found == name]


def shell_commands() -> list[list[str]]:
    """Return the words of each command of the RUN steps."""
    return [shlex.split(command) for text in all_of("RUN") for command in text.split("&&")]


def ignored(path: str) -> bool:
    """Return whether .dockerignore keeps a path of the checkout out of the image."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    parts = path.split("/")
    prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(
        fnmatch.fnmatch(prefix, pattern) or fnmatch.fnmatch(prefix, pattern.removeprefix("**/"))
        for pattern in patterns
        for prefix in prefixes
    )


def tracked() -> list[str]:
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this is no git checkout")
    return found.stdout.splitlines()


def test_the_image_installs_what_ci_installs_but_for_the_tests() -> None:
    (installed,) = [words for words in shell_commands() if words[:2] == ["pip", "install"]]
    assert installed == ["pip", "install", "--no-cache-dir", "."]
    assert "pip install -q '.[test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_an_image_without_the_cuda_module_is_an_error() -> None:
    (base,) = all_of("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.\d\d", base)
    assert "ZEROBENCH_CUDA=on" in all_of("ENV")


def test_the_toolkit_is_one_that_torch_is_built_with() -> None:
    requirement = (ROOT / "build_backend" / "torch_requirement.py").read_text(encoding="utf-8")
    (newest,) = re.findall(r'^NEWEST_TESTED_CUDA = "(\d+\.\d+)', requirement, re.MULTILINE)
    assert all_of("FROM")[0].startswith(f"nvidia/cuda:{newest}.")


def test_the_container_runs_as_a_user_of_its_own_in_a_folder_for_results() -> None:
    assert all_of("USER") == ["1001"]
    assert all_of("WORKDIR")[-1] == "/zerobench"
    assert any("/zerobench/results" in words for words in shell_commands())


def test_the_default_command_is_a_recipe() -> None:
    from typer.testing import CliRunner

    from zerobench.cli.main import app

    assert json.loads(all_of("ENTRYPOINT")[0]) == ["zerobench"]
    recipe, run, *words = json.loads(all_of("CMD")[0])
    assert (recipe, run) == ("recipe", "run")
    assert CliRunner().invoke(app, ["recipe", "show", *words]).exit_code == 0


def test_the_image_has_all_that_a_build_takes() -> None:
    kept = [path for path in tracked() if not ignored(path)]
    assert {"pyproject.toml", "README.md", "CMakeLists.txt"} <= set(kept)
    for folder in ("python", "csrc", "cmake", "build_backend"):
        assert [path for path in kept if path.startswith(f"{folder}/")] == [
            path for path in tracked() if path.startswith(f"{folder}/")
        ]


def test_the_image_leaves_out_what_only_developers_read() -> None:
    assert all(ignored(path) for path in (".git/HEAD", "tests/conftest.py", "docs/a/b.md", "python/a.so"))


def test_the_development_container_is_made_from_the_same_file() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert settings["postCreateCommand"] == "pip install '.[test]'"


@pytest.mark.long
def test_the_steps_of_pip_run_in_a_clean_environment(tmp_path: Path) -> None:
    """With this environment's version of torch, and CUDA only where this machine has a compiler for it."""
    source, home = tmp_path / "src", tmp_path / "venv"
    for path in (path for path in tracked() if not ignored(path)):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    venv.create(home, with_pip=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{home / 'bin'}:{env['PATH']}", "ZEROBENCH_CUDA": "auto"}
    torch = ["pip", "install", "-q", f"torch=={version('torch').partition('+')[0]}"]
    steps = [torch, *(words for words in shell_commands() if words[0] == "pip")]
    default = [*json.loads(all_of("ENTRYPOINT")[0]), *json.loads(all_of("CMD")[0])]
    for words in (*steps, [*default, "--quick", "--dry-run"]):
        subprocess.run(words, cwd=source, env=env, check=True, timeout=3000)
