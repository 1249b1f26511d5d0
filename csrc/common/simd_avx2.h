// Eight floats in an AVX2 register (with FMA and F16C), with the 16-bit types converted as common/simd_scalar.h says.
// For *_avx2.cpp sources only. Partial forms touch the first `numel` elements and read zeros for the rest.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace zb {
namespace {  // internal linkage: the same names exist with other instruction sets

struct Avx2 {
  static constexpr std::size_t kLanes = 8;
  using Float = __m256;

  static Float set(float value) { return _mm256_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

  template <DType kType>
  static Float load(const void* base, std::size_t index) {
    if constexpr (kType == DType::kFloat32) {
      return _mm256_loadu_ps(static_cast<const float*>(base) + index);
    } else {
      return widen<kType>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half(base) + index)));
    }
  }

  template <DType kType>
  static Float load(const void* base, std::size_t index, std::size_t numel) {
    if constexpr (kType == DType::kFloat32) {
      return _mm256_maskload_ps(static_cast<const float*>(base) + index, mask(numel));
    } else {
      alignas(16) std::uint16_t words[kLanes] = {};
      for (std::size_t i = 0; i < numel; ++i) words[i] = half(base)[index + i];
      return widen<kType>(_mm_load_si128(reinterpret_cast<const __m128i*>(words)));
    }
  }

  template <DType kType>
  static void store(void* base, std::size_t index, Float value) {
    if constexpr (kType == DType::kFloat32) {
      _mm256_storeu_ps(static_cast<float*>(base) + index, value);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(half(base) + index), narrow<kType>(value));
    }
  }

  template <DType kType>
  static void store(void* base, std::size_t index, Float value, std::size_t numel) {
    if constexpr (kType == DType::kFloat32) {
      _mm256_maskstore_ps(static_cast<float*>(base) + index, mask(numel), value);
    } else {
      alignas(16) std::uint16_t words[kLanes];
      _mm_store_si128(reinterpret_cast<__m128i*>(words), narrow<kType>(value));
      for (std::size_t i = 0; i < numel; ++i) half(base)[index + i] = words[i];
    }
  }

  // Past the caches; the address is a multiple of the bytes stored.
  template <DType kType>
  static void stream(void* base, std::size_t index, Float value) {
    if constexpr (kType == DType::kFloat32) {
      _mm256_stream_ps(static_cast<float*>(base) + index, value);
    } else {
      _mm_stream_si128(reinterpret_cast<__m128i*>(half(base) + index), narrow<kType>(value));
    }
  }
  static void stream_line(void* line, const void* source) {
    const auto* from = static_cast<const __m256i*>(source);
    auto* to = static_cast<__m256i*>(line);
    const __m256i low = _mm256_loadu_si256(from);
    const __m256i high = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, low);
    _mm256_stream_si256(to + 1, high);
  }
  static void stream_fence() { _mm_sfence(); }

  // Sixteen running sums of squares in double, lane = index mod 16. The products are exact.
  struct Squares {
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};

    void add(std::size_t part, Float x) {
      const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
      const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
      sums[2 * part] = _mm256_fmadd_pd(a, a, sums[2 * part]);
      sums[2 * part + 1] = _mm256_fmadd_pd(b, b, sums[2 * part + 1]);
    }
    void read(double* lanes) const {
      for (std::size_t i = 0; i < 4; ++i) _mm256_storeu_pd(lanes + 4 * i, sums[i]);
    }
  };

 private:
  static const std::uint16_t* half(const void* base) { return static_cast<const std::uint16_t*>(base); }
  static std::uint16_t* half(void* base) { return static_cast<std::uint16_t*>(base); }
  static __m256i mask(std::size_t numel) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(numel)), lane);
  }

  template <DType kType>
  static Float widen(__m128i bits) {
    if constexpr (kType == DType::kFloat16) {
      return _mm256_cvtph_ps(bits);
    } else {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }

  template <DType kType>
  static __m128i narrow(Float value) {
    if constexpr (kType == DType::kFloat16) {
      return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
      const __m256i upper = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), nan);
      const __m256i packed = _mm256_packus_epi32(upper, upper);  // within 128-bit halves
      return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }
  }
};

}  // namespace
}  // namespace zb
