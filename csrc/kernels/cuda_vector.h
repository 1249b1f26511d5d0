// Groups of elements of one dtype as one load or store of up to 16 bytes, and their conversions to and from float.
//
// Conversions round to nearest even and keep denormals. NaN stays NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace zb {

template <DType kType>
struct Element {  // float
  using Bits = std::uint32_t;
  static __device__ float to_float(Bits bits) { return __uint_as_float(bits); }
  static __device__ Bits from_float(float value) { return __float_as_uint(value); }
};

template <>
struct Element<DType::kBFloat16> {
  using Bits = std::uint16_t;
  static __device__ float to_float(Bits bits) { return __uint_as_float(static_cast<std::uint32_t>(bits) << 16); }
  static __device__ Bits from_float(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
};

template <>
struct Element<DType::kFloat16> {
  using Bits = std::uint16_t;
  static __device__ float to_float(Bits bits) { return __half2float(__ushort_as_half(bits)); }
  static __device__ Bits from_float(float value) { return __half_as_ushort(__float2half_rn(value)); }
};

// kNumel elements, aligned to their bytes: the compiler moves them with one instruction.
template <DType kType, int kNumel>
struct alignas(kNumel * sizeof(typename Element<kType>::Bits)) Group {
  using Bits = typename Element<kType>::Bits;
  static_assert(kNumel * sizeof(Bits) <= 16);

  Bits bits[kNumel];

  __device__ float get(int index) const { return Element<kType>::to_float(bits[index]); }
  __device__ void set(int index, float value) { bits[index] = Element<kType>::from_float(value); }
};

// Elements of 16 bytes.
template <DType kType>
inline constexpr int kGroupNumel = 16 / static_cast<int>(sizeof(typename Element<kType>::Bits));

// Elements before the first address that a group of kNumel elements may begin at.
template <DType kType, int kNumel>
__device__ std::size_t head_numel(const void* base) {
  constexpr std::size_t kElementBytes = sizeof(typename Element<kType>::Bits);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(base) / kElementBytes % kNumel;
  return past == 0 ? 0 : kNumel - past;
}

// with_dtype of common/dtype_dispatch.h for device code.
template <class Body>
__device__ void with_device_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBFloat16:
      return body.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return body.template operator()<DType::kFloat16>();
    case DType::kFloat32:
      break;
  }
  body.template operator()<DType::kFloat32>();
}

}  // namespace zb
