// Fills device memory with one float: master weights and optimizer state start this way.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace zb {

// destination[i] = value for i < numel, in the order of `stream`; returns after the launch.
void fill(float* destination, float value, std::size_t numel, cudaStream_t stream);

}  // namespace zb
