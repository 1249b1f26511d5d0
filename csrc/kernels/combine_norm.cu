// One block: flats side by side over the ranks, then one thread over the flats.
#include "common/cuda_check.h"
#include "kernels/cuda_kernels.h"
#include "kernels/norm.h"

namespace zb {
namespace {

constexpr unsigned kThreadNum = 256;

__global__ void combine_norm_kernel(NormArguments arguments) {
  __shared__ double flat_sums[kThreadNum];
  double total = 0.0;  // of thread 0
  for (std::size_t first = 0; first < arguments.flat_num; first += kThreadNum) {
    const std::size_t flat = first + threadIdx.x;
    if (flat < arguments.flat_num) {
      const double sum = sum_over_ranks(arguments, flat);
      arguments.flat_sums[flat] = sum;
      flat_sums[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const std::size_t left = arguments.flat_num - first;
      const unsigned num = left < kThreadNum ? static_cast<unsigned>(left) : kThreadNum;
#pragma unroll 8
      for (unsigned i = 0; i < num; ++i) total += flat_sums[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) write_step_scalars(arguments, total);
}

}  // namespace

void launch_combine_norm(const NormArguments& arguments, cudaStream_t stream) {
  combine_norm_kernel<<<1, kThreadNum, 0, stream>>>(arguments);
  ZB_CUDA(cudaGetLastError());
}

}  // namespace zb
