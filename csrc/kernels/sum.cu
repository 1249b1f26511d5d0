// Arrays added element by element, in float in their order.
#include <algorithm>
#include <cstdint>
#include <string>

#include "common/cuda_check.h"
#include "kernels/cuda_kernels.h"
#include "kernels/cuda_vector.h"

namespace zb {
namespace {

constexpr int kThreadNum = 256;
// Enough to keep the memory busy, few enough to leave room for kernels that compute.
constexpr std::size_t kBlockMax = 512;

struct SumArguments {
  void* destination;
  const void* sources[kSumSourceMax];
  int source_num;
  std::size_t numel;
};

template <DType kType, int kNumel>
__device__ void sum_group(const SumArguments& arguments, std::size_t element) {
  Group<kType, kNumel> in[kSumSourceMax];
#pragma unroll
  for (int k = 0; k < static_cast<int>(kSumSourceMax); ++k) {  // all loads before the first sum
    if (k < arguments.source_num) in[k].load(arguments.sources[k], element);
  }
  float sums[kNumel];
#pragma unroll
  for (int i = 0; i < kNumel; ++i) sums[i] = in[0].get(i);
#pragma unroll
  for (int k = 1; k < static_cast<int>(kSumSourceMax); ++k) {
    if (k >= arguments.source_num) break;
#pragma unroll
    for (int i = 0; i < kNumel; ++i) sums[i] = __fadd_rn(sums[i], in[k].get(i));
  }
  Group<kType, kNumel> out;
#pragma unroll
  for (int i = 0; i < kNumel; ++i) out.set(i, sums[i]);
  out.store(arguments.destination, element);
}

// Groups of kNumel elements between a head, after which the destination is aligned to them, and a tail.
template <DType kType, int kNumel>
__global__ void __launch_bounds__(kThreadNum) sum_kernel(const __grid_constant__ SumArguments arguments) {
  const std::size_t head = min(head_numel<kType, kNumel>(arguments.destination), arguments.numel);
  const std::size_t group_num = (arguments.numel - head) / kNumel;
  const std::size_t first = std::size_t{blockIdx.x} * kThreadNum + threadIdx.x;
  const std::size_t stride = std::size_t{gridDim.x} * kThreadNum;
  for (std::size_t index = first; index < group_num; index += stride) {
    sum_group<kType, kNumel>(arguments, head + index * kNumel);
  }
  const std::size_t single_num = arguments.numel - group_num * kNumel;  // fewer than two groups
  if (first < single_num) sum_group<kType, 1>(arguments, first < head ? first : first + group_num * kNumel);
}

template <DType kType>
void launch(const SumArguments& arguments, bool is_grouped, cudaStream_t stream) {
  const std::size_t numel_a_thread = is_grouped ? kGroupNumel<kType> : 1;
  const std::size_t block_numel = kThreadNum * numel_a_thread;
  const auto block_num = static_cast<unsigned>(std::min(kBlockMax, (arguments.numel + block_numel - 1) / block_numel));
  if (is_grouped) {
    sum_kernel<kType, kGroupNumel<kType>><<<block_num, kThreadNum, 0, stream>>>(arguments);
  } else {
    sum_kernel<kType, 1><<<block_num, kThreadNum, 0, stream>>>(arguments);
  }
  ZB_CUDA(cudaGetLastError());
}

}  // namespace

void launch_sum(void* destination, std::span<const void* const> sources, DType dtype, std::size_t numel,
                cudaStream_t stream) {
  ZB_EXPECT(!sources.empty() && sources.size() <= kSumSourceMax,
            "a sum has 1 to " + std::to_string(kSumSourceMax) + " sources, not " + std::to_string(sources.size()));
  if (numel == 0) return;
  SumArguments arguments{};
  arguments.destination = destination;
  arguments.source_num = static_cast<int>(sources.size());
  arguments.numel = numel;
  const std::size_t group_numel = 16 / dtype_bytes(dtype);
  bool is_grouped = true;  // where all arrays can be aligned to groups together
  for (std::size_t index = 0; index < sources.size(); ++index) {
    arguments.sources[index] = sources[index];
    const std::size_t apart = element_index(destination, dtype) - element_index(sources[index], dtype);  // modulo 2^64
    is_grouped = is_grouped && apart % group_numel == 0;
  }
  switch (dtype) {
    case DType::kBFloat16:
      return launch<DType::kBFloat16>(arguments, is_grouped, stream);
    case DType::kFloat16:
      return launch<DType::kFloat16>(arguments, is_grouped, stream);
    case DType::kFloat32:
      break;
  }
  launch<DType::kFloat32>(arguments, is_grouped, stream);
}

}  // namespace zb
