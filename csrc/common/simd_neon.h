// Four floats in a NEON register, with the 16-bit types converted as common/simd_scalar.h says.
// For *_neon.cpp sources only. Partial forms touch the first `numel` elements and read zeros for the rest.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace zb {
namespace {  // internal linkage: the same names exist with other instruction sets

struct Neon {
  static constexpr std::size_t kLanes = 4;
  using Float = float32x4_t;

  static Float set(float value) { return vdupq_n_f32(value); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float div(Float a, Float b) { return vdivq_f32(a, b); }
  static Float sqrt(Float a) { return vsqrtq_f32(a); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }

  template <DType kType>
  static Float load(const void* base, std::size_t index) {
    if constexpr (kType == DType::kFloat32) {
      return vld1q_f32(static_cast<const float*>(base) + index);
    } else {
      return widen<kType>(vld1_u16(static_cast<const std::uint16_t*>(base) + index));
    }
  }

  template <DType kType>
  static Float load(const void* base, std::size_t index, std::size_t numel) {
    using Element = std::conditional_t<kType == DType::kFloat32, float, std::uint16_t>;
    Element elements[kLanes] = {};
    for (std::size_t i = 0; i < numel; ++i) elements[i] = static_cast<const Element*>(base)[index + i];
    return load<kType>(elements, 0);
  }

  template <DType kType>
  static void store(void* base, std::size_t index, Float value) {
    if constexpr (kType == DType::kFloat32) {
      vst1q_f32(static_cast<float*>(base) + index, value);
    } else {
      vst1_u16(static_cast<std::uint16_t*>(base) + index, narrow<kType>(value));
    }
  }

  template <DType kType>
  static void store(void* base, std::size_t index, Float value, std::size_t numel) {
    using Element = std::conditional_t<kType == DType::kFloat32, float, std::uint16_t>;
    Element elements[kLanes];
    store<kType>(elements, 0, value);
    for (std::size_t i = 0; i < numel; ++i) static_cast<Element*>(base)[index + i] = elements[i];
  }

  // Intrinsics offer no store past the caches here; the core's own write streaming does without reading the line.
  template <DType kType>
  static void stream(void* base, std::size_t index, Float value) {
    store<kType>(base, index, value);
  }
  static void stream_line(void* line, const void* source) {
    const uint8x16x4_t bytes = vld1q_u8_x4(static_cast<const std::uint8_t*>(source));
    vst1q_u8_x4(static_cast<std::uint8_t*>(line), bytes);
  }
  static void stream_fence() {}

  // Sixteen running sums of squares in double, lane = index mod 16. The products are exact.
  struct Squares {
    float64x2_t sums[8] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0),
                           vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};

    void add(std::size_t part, Float x) {
      const float64x2_t a = vcvt_f64_f32(vget_low_f32(x));
      const float64x2_t b = vcvt_high_f64_f32(x);
      sums[2 * part] = vfmaq_f64(sums[2 * part], a, a);
      sums[2 * part + 1] = vfmaq_f64(sums[2 * part + 1], b, b);
    }
    void read(double* lanes) const {
      for (std::size_t i = 0; i < 8; ++i) vst1q_f64(lanes + 2 * i, sums[i]);
    }
  };

 private:
  template <DType kType>
  static Float widen(uint16x4_t bits) {
    if constexpr (kType == DType::kFloat16) {
      return vcvt_f32_f16(vreinterpret_f16_u16(bits));
    } else {
      return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
    }
  }

  template <DType kType>
  static uint16x4_t narrow(Float value) {
    if constexpr (kType == DType::kFloat16) {
      return vreinterpret_u16_f16(vcvt_f16_f32(value));
    } else {
      const uint32x4_t bits = vreinterpretq_u32_f32(value);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
      const uint32x4_t number = vceqq_f32(value, value);
      return vmovn_u32(vbslq_u32(number, vshrq_n_u32(rounded, 16), vdupq_n_u32(0x7FC0)));
    }
  }
};

}  // namespace
}  // namespace zb
