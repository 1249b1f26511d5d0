"""Facts of this build of zerobench; CMake writes the module."""

VERSION: str
TORCH_VERSION: str
TORCH_MINOR: str
TORCH_CUDA: str | None
TORCH_CXX11_ABI: bool
COMPILER: str
BUILD_TYPE: str
CUDA_MODULE: bool
CUDA_REASON: str
CUDA_VERSION: str | None
CUDA_ARCHITECTURES: tuple[str, ...]
NCCL_VERSION: str | None
