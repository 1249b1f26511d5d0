// The scalar form: the reference that every vector form equals bit for bit.
#include <algorithm>
#include <array>
#include <cstring>

#include "common/dtype_dispatch.h"
#include "common/ieee_scope.h"
#include "common/simd_scalar.h"
#include "kernels/cpu_kernels_forms.h"

namespace zb {
namespace {

constexpr std::size_t kSumLaneNum = 16;

template <DType kTo, DType kFrom>
[[gnu::noinline]] void cast_loop(void* destination, const void* source, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) scalar::store<kTo>(destination, i, scalar::load<kFrom>(source, i));
}

void cast(void* destination, DType destination_dtype, const void* source, DType source_dtype, std::size_t numel) {
  const IeeeScope scope;
  with_dtype(destination_dtype, [&]<DType kTo>() {
    with_dtype(source_dtype, [&]<DType kFrom>() { cast_loop<kTo, kFrom>(destination, source, numel); });
  });
}

template <DType kTo, DType kFrom>
[[gnu::noinline]] void add_loop(void* destination, const void* source, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    scalar::store<kTo>(destination, i, scalar::load<kTo>(destination, i) + scalar::load<kFrom>(source, i));
  }
}

void add(void* destination, DType destination_dtype, const void* source, DType source_dtype, std::size_t numel) {
  const IeeeScope scope;
  with_dtype(destination_dtype, [&]<DType kTo>() {
    with_dtype(source_dtype, [&]<DType kFrom>() { add_loop<kTo, kFrom>(destination, source, numel); });
  });
}

template <DType kType>
[[gnu::noinline]] void reduce_loop(void* destination, const void* const* sources, std::size_t source_num,
                                   std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    float sum = scalar::load<kType>(sources[0], i);
    for (std::size_t k = 1; k < source_num; ++k) sum += scalar::load<kType>(sources[k], i);
    scalar::store<kType>(destination, i, sum);
  }
}

void reduce(void* destination, const void* const* sources, std::size_t source_num, DType dtype, std::size_t numel) {
  const IeeeScope scope;
  with_dtype(dtype, [&]<DType kType>() { reduce_loop<kType>(destination, sources, source_num, numel); });
}

template <DType kType>
double block_sum(const void* source, std::size_t begin, std::size_t end) {
  std::array<double, kSumLaneNum> lanes{};
  for (std::size_t i = begin; i < end; ++i) {
    const auto value = static_cast<double>(scalar::load<kType>(source, i));
    lanes[i % kSumLaneNum] += value * value;
  }
  for (std::size_t half = kSumLaneNum / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <DType kType>
[[gnu::noinline]] double sum_loop(const void* source, std::size_t numel) {
  double sum = 0.0;
  for (std::size_t begin = 0; begin < numel; begin += kSumBlockNumel) {
    sum += block_sum<kType>(source, begin, std::min(numel, begin + kSumBlockNumel));
  }
  return sum;
}

double sum_of_squares(const void* source, DType dtype, std::size_t numel) {
  const IeeeScope scope;
  return with_dtype(dtype, [&]<DType kType>() { return sum_loop<kType>(source, numel); });
}

void copy(void* destination, const void* source, std::size_t bytes) {
  if (bytes > 0) std::memcpy(destination, source, bytes);
}

}  // namespace

const CpuKernels kScalarKernels{cast, add, reduce, sum_of_squares, copy};

}  // namespace zb
