// Sixteen floats in an AVX-512 register (F, BW, DQ, VL), with the 16-bit types converted as common/simd_scalar.h says.
// For *_avx512.cpp sources only. Partial forms touch the first `numel` elements and read zeros for the rest.
#pragma once

// GCC 12's own header trips its warning (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace zb {
namespace {  // internal linkage: the same names exist with other instruction sets

struct Avx512 {
  static constexpr std::size_t kLanes = 16;
  using Float = __m512;

  static Float set(float value) { return _mm512_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }

  template <DType kType>
  static Float load(const void* base, std::size_t index) {
    if constexpr (kType == DType::kFloat32) {
      return _mm512_loadu_ps(static_cast<const float*>(base) + index);
    } else {
      return widen<kType>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half(base) + index)));
    }
  }

  template <DType kType>
  static Float load(const void* base, std::size_t index, std::size_t numel) {
    if constexpr (kType == DType::kFloat32) {
      return _mm512_maskz_loadu_ps(mask(numel), static_cast<const float*>(base) + index);
    } else {
      return widen<kType>(_mm256_maskz_loadu_epi16(mask(numel), half(base) + index));
    }
  }

  template <DType kType>
  static void store(void* base, std::size_t index, Float value) {
    if constexpr (kType == DType::kFloat32) {
      _mm512_storeu_ps(static_cast<float*>(base) + index, value);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(half(base) + index), narrow<kType>(value));
    }
  }

  template <DType kType>
  static void store(void* base, std::size_t index, Float value, std::size_t numel) {
    if constexpr (kType == DType::kFloat32) {
      _mm512_mask_storeu_ps(static_cast<float*>(base) + index, mask(numel), value);
    } else {
      _mm256_mask_storeu_epi16(half(base) + index, mask(numel), narrow<kType>(value));
    }
  }

  // Past the caches; the address is a multiple of the bytes stored.
  template <DType kType>
  static void stream(void* base, std::size_t index, Float value) {
    if constexpr (kType == DType::kFloat32) {
      _mm512_stream_ps(static_cast<float*>(base) + index, value);
    } else {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(half(base) + index), narrow<kType>(value));
    }
  }
  static void stream_line(void* line, const void* source) {
    _mm512_stream_si512(static_cast<__m512i*>(line), _mm512_loadu_si512(source));
  }
  static void stream_fence() { _mm_sfence(); }

  // Sixteen running sums of squares in double, lane = index mod 16. The products are exact.
  struct Squares {
    __m512d low = _mm512_setzero_pd();
    __m512d high = _mm512_setzero_pd();

    void add(std::size_t /*part*/, Float x) {
      const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
      const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
      low = _mm512_fmadd_pd(a, a, low);
      high = _mm512_fmadd_pd(b, b, high);
    }
    void read(double* lanes) const {
      _mm512_storeu_pd(lanes, low);
      _mm512_storeu_pd(lanes + 8, high);
    }
  };

 private:
  static const std::uint16_t* half(const void* base) { return static_cast<const std::uint16_t*>(base); }
  static std::uint16_t* half(void* base) { return static_cast<std::uint16_t*>(base); }
  static __mmask16 mask(std::size_t numel) { return static_cast<__mmask16>((1U << numel) - 1U); }

  template <DType kType>
  static Float widen(__m256i bits) {
    if constexpr (kType == DType::kFloat16) {
      return _mm512_cvtph_ps(bits);
    } else {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }

  template <DType kType>
  static __m256i narrow(Float value) {
    if constexpr (kType == DType::kFloat16) {
      return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7FC0));
      return _mm512_cvtepi32_epi16(upper);
    }
  }
};

}  // namespace
}  // namespace zb
