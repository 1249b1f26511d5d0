// Conversions between float and the 16-bit types in integer arithmetic: what every vector form must reproduce.
//
// Round to nearest even, overflow to infinity, denormals kept. NaN stays NaN and becomes quiet: 0x7FC0 in bf16 (as in
// torch), sign and upper payload bits kept in fp16 (as F16C does). For sources without instruction set flags only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace zb::scalar {

inline float float_from_bfloat16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t bfloat16_from_float(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

inline float float_from_float16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {  // zero and denormals: units of 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa != 0 ? 0x00400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | (mantissa << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline std::uint16_t float16_from_float(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t result = 0;
  if (magnitude > 0x7F800000U) {
    result = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {  // 65520 and up round to infinity
    result = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {  // 2^-14 and up: normal
    result = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  } else if (magnitude > 0x33000000U) {  // above 2^-25 (a tie that goes to zero): denormal
    const std::uint32_t shift = 126U - (magnitude >> 23);
    const std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
    const std::uint32_t kept = mantissa >> shift;
    result = (mantissa + (1U << (shift - 1)) - 1U + (kept & 1U)) >> shift;
  }
  return static_cast<std::uint16_t>(result | sign);
}

template <DType kType>
float load(const void* base, std::size_t index) noexcept {
  if constexpr (kType == DType::kFloat32) {
    return static_cast<const float*>(base)[index];
  } else if constexpr (kType == DType::kBFloat16) {
    return float_from_bfloat16(static_cast<const std::uint16_t*>(base)[index]);
  } else {
    return float_from_float16(static_cast<const std::uint16_t*>(base)[index]);
  }
}

template <DType kType>
void store(void* base, std::size_t index, float value) noexcept {
  if constexpr (kType == DType::kFloat32) {
    static_cast<float*>(base)[index] = value;
  } else if constexpr (kType == DType::kBFloat16) {
    static_cast<std::uint16_t*>(base)[index] = bfloat16_from_float(value);
  } else {
    static_cast<std::uint16_t*>(base)[index] = float16_from_float(value);
  }
}

}  // namespace zb::scalar
