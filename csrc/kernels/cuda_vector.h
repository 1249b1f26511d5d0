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

// What one instruction moves. Written in PTX, since the compiler splits wide stores and sinks loads at its own taste.
template <int kBytes>
struct Word;

template <>
struct Word<2> {
  std::uint16_t value;
  __device__ void load(const void* from) { asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(from)); }
  __device__ void store(void* to) const { asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory"); }
};

template <>
struct Word<4> {
  std::uint32_t value;
  __device__ void load(const void* from) { asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from)); }
  __device__ void store(void* to) const { asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory"); }
};

template <>
struct Word<8> {
  std::uint32_t x, y;
  __device__ void load(const void* from) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(from));
  }
  __device__ void store(void* to) const {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
  }
};

template <>
struct Word<16> {
  std::uint32_t x, y, z, w;
  __device__ void load(const void* from) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "l"(from));
  }
  __device__ void store(void* to) const {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
  }
};

// kNumel elements in registers. In memory they are aligned to their bytes and move by one instruction.
template <DType kType, int kNumel>
struct Group {
  using Bits = typename Element<kType>::Bits;

  Bits bits[kNumel];

  __device__ float get(int index) const { return Element<kType>::to_float(bits[index]); }
  __device__ void set(int index, float value) { bits[index] = Element<kType>::from_float(value); }

  // Elements [element, element + kNumel) of an array.
  __device__ void load(const void* base, std::size_t element) {
    Word<sizeof bits> word;
    word.load(static_cast<const Bits*>(base) + element);
    memcpy(bits, &word, sizeof bits);
  }
  __device__ void store(void* base, std::size_t element) const {
    Word<sizeof bits> word;
    memcpy(&word, bits, sizeof bits);
    word.store(static_cast<Bits*>(base) + element);
  }
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
