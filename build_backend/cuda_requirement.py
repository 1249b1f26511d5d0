"""What the build of zerobench._cuda needs beyond the machine's own toolkit.

CMake decides whether the module is built (cmake/ZerobenchCuda.cmake). Here the build environment is given NVIDIA's
compiler packages where torch is a CUDA build and no nvcc is there, and CMake is told where the packages are.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from torch_finder import Torch, find_package, target_site_packages
from torch_requirement import NEWEST_TESTED_CUDA

COMPILER_PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "nvidia-nvtx",
)
# The packages for CUDA 12 hold ptxas and headers, but no nvcc.
FIRST_CUDA_WITH_COMPILER_PACKAGES = 13


def cuda_wanted() -> str:
    wanted = os.environ.get("ZEROBENCH_CUDA", "auto").lower()
    if wanted not in ("on", "off", "auto"):
        raise SystemExit(f"zerobench: ZEROBENCH_CUDA is on, off or auto, not {wanted!r}.")
    return wanted


def build_requirements(torch: Torch | None, nvcc: Path | None) -> list[str]:
    """`torch` is the target's, None where the build brings its own; `nvcc` is the machine's."""
    wanted = cuda_wanted()
    if wanted == "off":
        return []
    cuda = torch.cuda if torch is not None else NEWEST_TESTED_CUDA if _has_nvidia_driver() else None
    if cuda is None and wanted == "on":
        cuda = NEWEST_TESTED_CUDA
    if cuda is None:
        return []
    requirements = []
    major, minor = cuda.split(".")[:2]
    if nvcc is None and int(major) >= FIRST_CUDA_WITH_COMPILER_PACKAGES:
        requirements += [f"{package}=={major}.{minor}.*" for package in COMPILER_PACKAGES]
    # torch's CUDA builds bring NCCL with them; beside a CPU build it is asked for only on demand.
    if wanted == "on" and nccl_directory() is None:
        requirements.append(f"nvidia-nccl-cu{major}")
    return requirements


def cmake_defines() -> dict[str, str]:
    return {
        "ZEROBENCH_CUDA": cuda_wanted(),
        "ZEROBENCH_CUDA_ARCHITECTURES": os.environ.get("CUDAARCHS", ""),
        # Empty where nothing was found: a kept build folder may hold the directories of an earlier environment.
        "ZEROBENCH_NVCC": str(toolkit_nvcc() or packaged_nvcc() or ""),
        "ZEROBENCH_NCCL_DIR": str(nccl_directory() or ""),
    }


def toolkit_nvcc() -> Path | None:
    candidates = [os.environ.get("CUDACXX")]
    candidates += [
        f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)


def packaged_nvcc() -> Path | None:
    candidates = (path / f"cu{FIRST_CUDA_WITH_COMPILER_PACKAGES}/bin/nvcc" for path in _nvidia_packages())
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def nccl_directory() -> Path | None:
    """The nvidia-nccl package of the target or build environment."""
    candidates = (path / "nccl" for path in _nvidia_packages())
    return next((path for path in candidates if (path / "include/nccl.h").is_file()), None)


def _nvidia_packages() -> list[Path]:
    """nvidia is a namespace package of many distributions."""
    return [*find_package("nvidia", target_site_packages()), *find_package("nvidia", sys.path)]


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").is_file()
