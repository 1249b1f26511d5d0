// Sum of squares in double. Which thread adds which element follows from dtype and numel alone, not from the address,
// the device or what else runs; the block that ends last adds the blocks' sums in a fixed tree.
#include <algorithm>
#include <cstdint>

#include "common/cuda_check.h"
#include "common/dtype_dispatch.h"
#include "kernels/cuda_kernels.h"
#include "kernels/cuda_vector.h"

namespace zb {
namespace {

constexpr int kThreadNum = 256;
constexpr int kWarpNum = kThreadNum / 32;
constexpr int kUnroll = 4;  // groups that a thread loads before it adds
constexpr std::size_t kMaxBlockNum = 2048;

struct Scratch {
  double block_sums[kMaxBlockNum];
  unsigned ended_block_num;  // 0 between calls
};

// The sum over a block's threads, in thread 0.
__device__ double block_sum(double value) {
  __shared__ double warp_sums[kWarpNum];
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_down_sync(0xFFFFFFFFU, value, apart);
  __syncthreads();  // an earlier call's sums have been read
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = warp_sums[0];
#pragma unroll
  for (int warp = 1; warp < kWarpNum; ++warp) sum += warp_sums[warp];
  return sum;
}

// Elements [index * kNumel, ...) of the source; zeros past its end.
template <DType kType, int kNumel, bool kAligned>
__device__ Group<kType, kNumel> load_group(const void* source, std::size_t index, std::size_t numel) {
  Group<kType, kNumel> group{};
  if (kAligned && (index + 1) * kNumel <= numel) {
    group.load(source, index * kNumel);
    return group;
  }
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    const std::size_t at = index * kNumel + i;
    if (at < numel) group.bits[i] = static_cast<const typename Element<kType>::Bits*>(source)[at];
  }
  return group;
}

template <DType kType, int kNumel>
__device__ void add_squares(double (&sums)[kNumel], const Group<kType, kNumel>& group) {
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    const double value = group.get(i);
    sums[i] = __fma_rn(value, value, sums[i]);
  }
}

// Every (grid size)-th group, in order.
template <DType kType, bool kAligned>
__device__ double thread_sum(const void* source, std::size_t numel) {
  constexpr int kNumel = kGroupNumel<kType>;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * kThreadNum;
  std::size_t index = static_cast<std::size_t>(blockIdx.x) * kThreadNum + threadIdx.x;
  double sums[kNumel] = {};
  if constexpr (kAligned) {
    for (; index + (kUnroll - 1) * stride < numel / kNumel; index += kUnroll * stride) {
      Group<kType, kNumel> groups[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) groups[k].load(source, (index + k * stride) * kNumel);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) add_squares(sums, groups[k]);
    }
  }
  for (; index * kNumel < numel; index += stride) {
    add_squares(sums, load_group<kType, kNumel, kAligned>(source, index, numel));
  }
#pragma unroll
  for (int half = kNumel / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

template <DType kType, bool kAligned>
__global__ void __launch_bounds__(kThreadNum, 4)
    sum_of_squares_kernel(double* result, const void* source, std::size_t numel, Scratch* scratch) {
  __shared__ bool ends_last;
  const double sum = block_sum(thread_sum<kType, kAligned>(source, numel));
  if (threadIdx.x == 0) {
    scratch->block_sums[blockIdx.x] = sum;
    __threadfence();
    // Back to 0 by itself with the last block.
    ends_last = atomicInc(&scratch->ended_block_num, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!ends_last) return;
  __threadfence();
  double total = 0.0;
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kThreadNum) {
    total += __ldcg(&scratch->block_sums[block]);  // past this multiprocessor's own cache
  }
  total = block_sum(total);
  if (threadIdx.x == 0) *result = total;
}

}  // namespace

std::size_t sum_scratch_bytes() { return sizeof(Scratch); }

void launch_sum_of_squares(double* result, const void* source, DType dtype, std::size_t numel, void* scratch,
                           cudaStream_t stream) {
  with_dtype(dtype, [&]<DType kType>() {
    constexpr std::size_t kBlockNumel = std::size_t{kThreadNum} * kUnroll * kGroupNumel<kType>;
    const std::size_t wanted_num = std::max<std::size_t>((numel + kBlockNumel - 1) / kBlockNumel, 1);
    const auto block_num = static_cast<unsigned>(std::min(wanted_num, kMaxBlockNum));
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(source) % 16 == 0;
    auto* kernel = is_aligned ? sum_of_squares_kernel<kType, true> : sum_of_squares_kernel<kType, false>;
    kernel<<<block_num, kThreadNum, 0, stream>>>(result, source, numel, static_cast<Scratch*>(scratch));
  });
  ZB_CUDA(cudaGetLastError());
}

}  // namespace zb
