// Kernels whose threads go through all elements in strides of the grid, however large it is.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "common/cuda_check.h"

namespace zb {

inline constexpr unsigned kStrideThreadNum = 256;
inline constexpr std::size_t kStrideMaxBlockNum = 4096;  // enough to fill any device; the loop takes the rest

__device__ inline std::size_t first_of_stride() {
  return static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline std::size_t grid_stride() { return static_cast<std::size_t>(gridDim.x) * blockDim.x; }

// Launches a kernel over so many elements, if there are any: a grid of zero blocks is an error.
template <class... Arguments>
void launch_strided(void (*kernel)(Arguments...), std::size_t numel, cudaStream_t stream, Arguments... arguments) {
  if (numel == 0) return;
  const std::size_t block_num = std::min((numel + kStrideThreadNum - 1) / kStrideThreadNum, kStrideMaxBlockNum);
  kernel<<<static_cast<unsigned>(block_num), kStrideThreadNum, 0, stream>>>(arguments...);
  ZB_CUDA(cudaGetLastError());
}

}  // namespace zb
