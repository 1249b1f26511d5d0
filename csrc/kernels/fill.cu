#include "kernels/fill.h"

#include <algorithm>

#include "common/cuda_check.h"

namespace zb {
namespace {

constexpr unsigned kThreadNum = 256;
constexpr std::size_t kMaxBlockNum = 4096;  // enough to fill any device; the loop takes the rest

__global__ void fill_kernel(float* destination, float value, std::size_t numel) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numel; i += stride) {
    destination[i] = value;
  }
}

}  // namespace

void fill(float* destination, float value, std::size_t numel, cudaStream_t stream) {
  if (numel == 0) {
    return;  // a grid of zero blocks is an error
  }
  const std::size_t block_num = std::min((numel + kThreadNum - 1) / kThreadNum, kMaxBlockNum);
  fill_kernel<<<static_cast<unsigned>(block_num), kThreadNum, 0, stream>>>(destination, value, numel);
  ZB_CUDA(cudaGetLastError());
}

}  // namespace zb
