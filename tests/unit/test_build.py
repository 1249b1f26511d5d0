"""The build: which torch it takes, what the wheel then requires, and what every compiler command holds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from zerobench import errors

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "build_backend"
# What pip's isolated build environment leaves of sys.path: the target's site-packages are out of sight.
ISOLATED = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without any package."""
    path = tmp_path_factory.mktemp("environment") / "v"
    venv.create(path, with_pip=False, symlinks=True)
    return path


def add_torch(site_packages: Path, version: str, cuda: str | None = None) -> Path:
    """A torch that cannot be imported, as one that was installed without its dependencies."""
    directory = site_packages / "torch"
    (directory / "include").mkdir(parents=True)
    (directory / "__init__.py").write_text("raise ImportError('torch was imported')\n")
    text = f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    (directory / "version.py").write_text(text)
    return directory


def run_backend(python: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ZEROBENCH_", "CUDA", "PYTHON"))}
    env |= {"PYTHONPATH": str(BACKEND), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [str(python), "-c", ISOLATED + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def site_packages(environment: Path) -> Path:
    return environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


ASK = "import torch_requirement as t; torch = t.installed_torch(); "


def test_torch_of_the_target_is_found_from_within_isolation(target: Path) -> None:
    python = target / "bin/python"
    code = ASK + "print(torch and (torch.version, torch.minor, torch.cuda, str(torch.directory)))"
    assert run_backend(python, code).stdout.strip() == "None"
    directory = add_torch(site_packages(target), "2.13.1+cu130", "13.0")
    try:
        run = run_backend(python, code)
        assert run.stdout.strip() == str(("2.13.1+cu130", "2.13", "13.0", str(directory))), run.stderr
    finally:
        shutil.rmtree(directory)


def test_without_torch_the_newest_tested_minor_is_asked_for(target: Path) -> None:
    code = "import torch_requirement as t; print(t.NEWEST_TESTED, t.TESTED_RANGE)"
    newest, tested = run_backend(target / "bin/python", code).stdout.split()
    minor = int(re.fullmatch(r"torch==2\.(\d+)\.\*", newest)[1])
    assert tested == f"torch>=2.9,<2.{minor + 1}"


def test_without_torch_and_isolation_the_error_names_the_cure(target: Path) -> None:
    run = run_backend(target / "bin/python", "import torch_requirement as t; t.torch_to_build_against()")
    assert run.returncode == 1
    assert run.stderr.startswith("zerobench: no torch is installed")
    assert "pip install 'torch>=2.9,<2.15'" in run.stderr
    assert "Traceback" not in run.stderr


@contextlib.contextmanager
def torch_in(environment: Path, version: str) -> Iterator[None]:
    directory = add_torch(site_packages(environment), version)
    try:
        yield
    finally:
        shutil.rmtree(directory)


BUILD = "import torch_requirement as t; torch = t.torch_to_build_against(); "


def test_torch_older_than_the_tested_range_is_an_error_that_a_variable_permits(target: Path) -> None:
    code = BUILD + "print(t.wheel_requirement(torch))"
    with torch_in(target, "2.8.0"):
        refused = run_backend(target / "bin/python", code)
        permitted = run_backend(target / "bin/python", code, ZEROBENCH_ALLOW_UNTESTED_TORCH="1")
    assert refused.returncode == 1
    assert "torch 2.8.0 " in refused.stderr
    assert "older than the tested range torch>=2.9,<2.15" in refused.stderr
    assert "ZEROBENCH_ALLOW_UNTESTED_TORCH=1" in refused.stderr
    assert permitted.stdout.strip() == "torch==2.8.*", permitted.stderr


@pytest.mark.parametrize(
    ("version", "minor", "newer"),
    [
        ("2.9.0", "2.9", False),
        ("2.14.1+cu130", "2.14", False),
        ("2.15.0.dev20260101", "2.15", True),
        ("3.0.0", "3.0", True),
    ],
)
def test_only_torch_newer_than_the_tested_range_is_warned_about(
    target: Path, version: str, minor: str, newer: bool
) -> None:
    with torch_in(target, version):
        run = run_backend(
            target / "bin/python", BUILD + "print(t.wheel_requirement(torch), t.newer_warning(torch))"
        )
    requirement, _, warning = run.stdout.strip().partition(" ")
    assert requirement == f"torch=={minor}.*", run.stderr
    if newer:
        assert f"torch {version} " in warning
        assert "newer than the tested range torch>=2.9,<2.15" in warning
    else:
        assert warning == "None"


def test_a_build_against_newer_torch_prints_the_warning_and_goes_on(target: Path, tmp_path: Path) -> None:
    backend = pytest.importorskip(
        "scikit_build_core", reason="scikit-build-core is not installed: pip install '.[test]'"
    )
    packages = tmp_path / "packages"  # another name than site-packages, which ISOLATED hides
    packages.symlink_to(Path(backend.__file__).parents[1])
    code = "import zerobench_build as b; print(b._with_defines(None)['cmake.define.ZEROBENCH_TORCH_DIR'])"
    with torch_in(target, "2.99.0"):
        run = run_backend(target / "bin/python", code, PYTHONPATH=f"{BACKEND}:{packages}")
    assert run.stdout.strip() == str(site_packages(target) / "torch"), run.stderr
    assert run.stderr.startswith("zerobench: warning: torch 2.99.0 ")


def test_source_distribution_names_the_range_and_a_wheel_one_minor(target: Path) -> None:
    code = (
        "import zerobench_metadata as m\nfor state in ('sdist', 'metadata_wheel', 'wheel', 'editable'):\n"
        "  p = m.Provider(); p.build_state(state)\n"
        "  print(p.dynamic_metadata({'dependencies': ['numpy']}, {})['dependencies'])"
    )
    directory = add_torch(site_packages(target), "2.10.2")
    try:
        lines = run_backend(target / "bin/python", code).stdout.splitlines()
    finally:
        shutil.rmtree(directory)
    assert lines == ["['torch>=2.9,<2.15', 'numpy']"] + ["['torch==2.10.*', 'numpy']"] * 3


def test_backend_without_scikit_build_core_says_what_to_install(target: Path) -> None:
    run = run_backend(target / "bin/python", "import zerobench_build")
    assert run.returncode == 1
    assert "pip install scikit-build-core" in run.stderr
    assert "Traceback" not in run.stderr


CUDA_ASK = (
    "import cuda_requirement as c; from torch_finder import Torch; from pathlib import Path; "
    "print(*c.build_requirements({torch}, {nvcc}))"
)
CPU_TORCH = "Torch(Path('/x'), '2.13.0+cpu', None)"
CUDA_TORCH = "Torch(Path('/x'), '2.13.0', '13.0')"


def ask_cuda(target: Path, torch: str, nvcc: str = "None", **environment: str) -> list[str]:
    run = run_backend(target / "bin/python", CUDA_ASK.format(torch=torch, nvcc=nvcc), **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.parametrize("torch", [CPU_TORCH, CUDA_TORCH])
def test_cuda_off_asks_for_nothing(target: Path, torch: str) -> None:
    assert ask_cuda(target, torch, ZEROBENCH_CUDA="off") == []


def test_cpu_torch_asks_for_no_compiler(target: Path) -> None:
    assert ask_cuda(target, CPU_TORCH) == []


def test_cuda_torch_without_nvcc_asks_for_the_compiler_packages_of_its_version(target: Path) -> None:
    names = [requirement.split("==") for requirement in ask_cuda(target, CUDA_TORCH)]
    assert {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"} <= {name for name, _ in names}
    assert {version for _, version in names} == {"13.0.*"}


def test_cuda_12_torch_asks_for_nothing_since_no_package_holds_its_compiler(target: Path) -> None:
    assert ask_cuda(target, "Torch(Path('/x'), '2.9.1', '12.8')") == []


def test_cuda_torch_with_nvcc_asks_for_no_compiler(target: Path) -> None:
    assert ask_cuda(target, CUDA_TORCH, "Path('/usr/bin/nvcc')") == []


def test_nvcc_named_by_variable_is_taken_first(target: Path, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    code = "import cuda_requirement as c; print(c.toolkit_nvcc())"
    assert run_backend(target / "bin/python", code, CUDACXX=str(nvcc)).stdout.strip() == str(nvcc)


def test_cuda_on_asks_for_nccl_where_none_is(target: Path) -> None:
    assert "nvidia-nccl-cu13" in ask_cuda(target, CPU_TORCH, ZEROBENCH_CUDA="on")


def test_cuda_word_that_is_none_is_an_error(target: Path) -> None:
    code = CUDA_ASK.format(torch=CPU_TORCH, nvcc="None")
    run = run_backend(target / "bin/python", code, ZEROBENCH_CUDA="yes")
    assert run.returncode == 1
    assert run.stderr.strip() == "zerobench: ZEROBENCH_CUDA is on, off or auto, not 'yes'."


def backend_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BACKEND / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def needs() -> ModuleType:
    return backend_module("build_needs")


@pytest.mark.parametrize(("asked", "stays"), [(None, True), ("gcc", True), ("false", False)])
def test_a_kept_build_folder_takes_another_compiler(tmp_path, asked, stays) -> None:
    cache = tmp_path / "CMakeCache.txt"
    cache.write_text(f"A:BOOL=ON\nCMAKE_CXX_COMPILER:FILEPATH={shutil.which('gcc')}\nB:STRING=x=y\n")
    (tmp_path / "CMakeFiles").mkdir()
    environ = {} if asked is None else {"CXX": asked}
    backend_module("compiler_choice").forget_other_compiler(tmp_path, environ)
    assert cache.exists() == (tmp_path / "CMakeFiles").exists() == stays


def test_without_a_compiler_the_error_names_the_cure(needs, tmp_path) -> None:
    environ = {"PATH": str(tmp_path)}
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler was found; install one .*g\+\+"):
        needs.expect_compiler({}, environ)
    needs.expect_compiler({"cmake.define.CMAKE_CXX_COMPILER": "/opt/c++"}, environ)
    needs.expect_compiler({}, environ | {"CMAKE_ARGS": "-DCMAKE_CXX_COMPILER=/opt/c++"})
    with pytest.raises(SystemExit, match="CXX names the compiler 'ccache-no', which was not found"):
        needs.expect_compiler({}, environ | {"CXX": "ccache-no g++"})
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    needs.expect_compiler({}, environ | {"CXX": f"{compiler} -m64"})
    needs.expect_compiler({}, environ | {"CXX": "g++"})
    needs.expect_compiler({}, environ)


def test_a_tree_that_cannot_be_written_names_the_cure(needs, tmp_path) -> None:
    needs.expect_writable("build/*", root=tmp_path)
    needs.expect_writable(str(tmp_path / "another/{wheel_tag}"), root=Path("/proc/sys"))
    read_only = "/proc/sys/build/{wheel_tag}" if os.geteuid() == 0 else "/usr/build"
    with pytest.raises(SystemExit, match=r"cannot be written into /.*; copy the source.*-C build-dir=FOLDER"):
        needs.expect_writable(read_only, root=tmp_path)


def test_a_torch_of_another_minor_is_noticed_before_it_is_imported() -> None:
    from zerobench import _native

    _native.check_installation()
    with pytest.raises(errors.Error, match=r"built against torch 2\.1 and torch 2\.\d+"):
        _native.check_installation(built_against="2.1")


@pytest.mark.parametrize(
    ("built_for", "capabilities", "others"),
    [
        (("80-real", "90-real", "100"), [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], [(7, 5)]),
        (("86-real",), [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        (("75-virtual",), [(7, 5), (9, 0)], [(7, 0)]),
        (("90a-real",), [(9, 0), (7, 5)], []),  # left to the driver
    ],
)
def test_a_gpu_that_the_kernels_were_not_built_for_is_named_with_the_cure(
    built_for, capabilities, others
) -> None:
    from zerobench import _native

    expect_kernels_for = partial(_native.expect_kernels_for, built_for=built_for)
    for major, minor in capabilities:
        expect_kernels_for("cuda:0", "a GPU", major=major, minor=minor)
    for major, minor in others:
        with pytest.raises(
            errors.Error, match=rf"cuda:0 \(a GPU\) .* {major}\.{minor} .* `CUDAARCHS={major}{minor} "
        ):
            expect_kernels_for("cuda:0", "a GPU", major=major, minor=minor)


def test_one_version_everywhere() -> None:
    import zerobench
    from zerobench import _build_info

    pyproject = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cmake = re.search(r"project\(zerobench VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert pyproject[1] == cmake[1] == zerobench.__version__ == _build_info.VERSION


def test_build_facts_name_the_torch_that_is_installed() -> None:
    from zerobench import _build_info

    version = importlib.metadata.version("torch")
    assert version.split("+")[0].startswith(_build_info.TORCH_MINOR + ".")
    assert _build_info.CUDA_REASON
    assert bool(_build_info.CUDA_ARCHITECTURES) == _build_info.CUDA_MODULE


def test_installed_package_requires_the_torch_minor_it_was_built_against() -> None:
    from zerobench import _build_info

    try:
        requirements = importlib.metadata.requires("zerobench")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("zerobench is used from its source tree, so there is no metadata to read")
    assert [r for r in requirements if re.match(r"torch\b", r)] == [f"torch=={_build_info.TORCH_MINOR}.*"]


def test_cuda_module_without_a_driver_says_so() -> None:
    from zerobench import _build_info

    if not _build_info.CUDA_MODULE:
        pytest.skip(f"this build has no CUDA module: {_build_info.CUDA_REASON}")
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(ImportError, match=r"needs an NVIDIA driver|libnccl\.so\.2"):
        import zerobench._cuda  # noqa: F401


def test_an_instruction_set_that_the_cpu_lacks_is_one_sentence() -> None:
    code = "from zerobench import _native; _native.load()"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ZEROBENCH_ISA": "sse9"}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    said = "zerobench.errors.ConfigError: ZEROBENCH_ISA=sse9 is not available here; set it to one of"
    assert run.stderr.splitlines()[-1].startswith(said)


def test_where_the_cuda_module_does_not_load_the_reason_is_said() -> None:
    from zerobench import _build_info, _native

    if _build_info.CUDA_MODULE and Path("/proc/driver/nvidia/version").exists():
        assert _native.load_cuda().__name__ == "zerobench._cuda"
        return
    with pytest.raises(errors.Error, match=re.escape(_build_info.CUDA_REASON)):
        _native.load_cuda()


@pytest.mark.parametrize("driver", [False, True])
def test_what_to_install_for_the_cuda_module_is_said_of_machines_with_a_driver(driver) -> None:
    from zerobench.host import machine

    built = {"cuda_module": False, "cuda_reason": "nvcc was not found: install it"}
    reason = machine.gpu_module_facts(built, has_driver=driver)["reason"]
    assert reason.startswith("not needed without an NVIDIA driver; ") == (not driver)
    assert reason.endswith("nvcc was not found: install it")


def configure(tmp_path: Path, *options: str, unity: str = "OFF") -> dict[str, str]:
    """Each source's compiler command, from a configuration without torch and Python."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    command = [
        cmake,
        "-S",
        str(ROOT),
        "-B",
        str(tmp_path),
        "-DZEROBENCH_PYTHON=OFF",
        f"-DZEROBENCH_UNITY={unity}",
    ]
    command += options
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    entries = json.loads((tmp_path / "compile_commands.json").read_text())
    commands = {Path(entry["file"]): entry["command"] for entry in entries}
    return {
        file.relative_to(tmp_path if file.is_relative_to(tmp_path) else ROOT).as_posix(): command
        for file, command in commands.items()
    }


def cuda_decision(tmp_path: Path, **facts: object) -> subprocess.CompletedProcess[str]:
    """Return the build's decision on its CUDA module, its output on one line."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    script = tmp_path / "decide.cmake"
    script.write_text(f"include({ROOT}/cmake/ZerobenchCuda.cmake)\n")
    command = [cmake, *(f"-DZEROBENCH_{name}={value}" for name, value in facts.items()), "-P", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    run.stdout = " ".join((run.stdout + run.stderr).split())
    return run


@pytest.mark.parametrize("wanted", ["auto", "on"])
@pytest.mark.parametrize(
    ("cuda", "toolkit"),
    [
        ("12.8", "a CUDA 12 toolkit with nvcc (NVIDIA's packages for pip have no nvcc before CUDA 13)"),
        ("13.0", "a CUDA 13 toolkit with nvcc"),
        ("", "a CUDA toolkit with nvcc"),
    ],
)
def test_without_nvcc_the_toolkit_for_the_cuda_of_torch_is_named(tmp_path, cuda, toolkit, wanted) -> None:
    false = shutil.which("false")
    run = cuda_decision(tmp_path, CUDA=wanted, TORCH_cuda=cuda, NVCC=false, NCCL_DIR=tmp_path)
    assert bool(run.returncode) == (wanted == "on")
    assert f"nvcc was not found: install {toolkit}" in run.stdout


@pytest.mark.parametrize(("cuda", "package"), [("12.8", "cu12"), ("13.0", "cu13"), ("", "cu13")])
def test_without_nccl_the_package_for_the_cuda_of_torch_is_named(tmp_path, cuda, package) -> None:
    if any(Path(directory, "include/nccl.h").exists() for directory in ("/usr", "/usr/local/cuda")):
        pytest.skip("this machine has an NCCL of its own")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho V13.0.1\n")
    nvcc.chmod(0o755)
    for found, text in ((nvcc, "were not found: "), (shutil.which("false"), "nvcc was not found: ")):
        run = cuda_decision(tmp_path, CUDA="on", TORCH_cuda=cuda, NVCC=found, NCCL_DIR=tmp_path)
        assert run.returncode == 1
        assert text in run.stdout
        assert f"install the package nvidia-nccl-{package}" in run.stdout


def test_compiler_commands(tmp_path: Path) -> None:
    commands = configure(tmp_path)
    isa = re.compile(r"\s-m(?!64\b)[a-z0-9=.-]+")
    for source, command in commands.items():
        assert "-ffp-contract=off" in command, source
        assert "-Wshadow" in command, source
        assert not re.search(r"-ffast-math|-Ofast|-funsafe-math|-march=native", command), source
        suffix = re.search(r"_(avx2|avx512|neon)\.cpp$", source)
        flags = set(re.findall(isa, command))
        if suffix is None:
            assert not flags, f"{source} is compiled for {flags}"
        elif suffix[1] != "neon":
            assert {" -mavx2", " -mfma", " -mf16c"} <= flags, source
            assert (" -mavx512f" in flags) == (suffix[1] == "avx512"), source


def test_groups_of_sources_hold_no_file_of_one_instruction_set(tmp_path: Path) -> None:
    alone = configure(tmp_path / "alone")
    grouped = configure(tmp_path / "grouped", unity="ON")
    groups = [source for source in grouped if source.endswith(".cxx")]
    inside = re.findall(
        r'"[^"]+/(csrc/[^"]+)"', "".join((tmp_path / "grouped" / name).read_text() for name in groups)
    )
    assert groups
    assert not [source for source in inside if re.search(r"_(avx2|avx512|neon)\.cpp$", source)]
    assert sorted([*inside, *(source for source in grouped if source not in groups)]) == sorted(alone)


def test_sources_of_another_processor_are_left_out(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no AArch64 cross compiler (Debian: g++-aarch64-linux-gnu) is installed")
    system = [
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
    ]
    commands = configure(tmp_path, *system)
    assert any(source.endswith("_neon.cpp") for source in commands)
    assert not [source for source in commands if re.search(r"_avx(2|512)\.cpp$", source)]
    assert not [source for source, command in commands.items() if " -mavx" in command]
