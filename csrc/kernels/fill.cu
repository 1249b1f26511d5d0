#include "kernels/fill.h"

#include "kernels/cuda_grid_stride.h"

namespace zb {
namespace {

__global__ void fill_kernel(float* destination, float value, std::size_t numel) {
  for (std::size_t i = first_of_stride(); i < numel; i += grid_stride()) destination[i] = value;
}

}  // namespace

void fill(float* destination, float value, std::size_t numel, cudaStream_t stream) {
  launch_strided(fill_kernel, numel, stream, destination, value, numel);
}

}  // namespace zb
