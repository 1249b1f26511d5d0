// The vector forms of the streams, written once over a register type (common/simd_*.h).
#pragma once

#include "common/dtype_dispatch.h"
#include "common/simd_loop.h"
#include "optim/stream_forms.h"

namespace zb {
namespace {  // internal linkage: included by sources with different instruction set flags

template <class Simd>
struct VectorStreams {
  using Float = typename Simd::Float;
  static constexpr DType kFloat = DType::kFloat32;

  template <DType kGradient, DType kLow, bool kHasLow, class Access>
  [[gnu::noinline]] static void mix_range(const AdamSpan& span, std::size_t begin, std::size_t end) {
    constexpr std::size_t kStripNumel = 32;
    const AdamSpan at = span;
    const auto update = [&](auto access, std::size_t i) __attribute__((always_inline)) {
      const Float g = access.template load<kGradient>(at.gradient, i);
      const Float m = Simd::add(access.template load<kFloat>(at.exp_avg, i), g);
      const Float v = Simd::add(access.template load<kFloat>(at.exp_avg_sq, i), g);
      const Float p = Simd::add(access.template load<kFloat>(at.master, i), g);
      access.template store<kFloat>(at.exp_avg, i, m);
      access.template store<kFloat>(at.exp_avg_sq, i, v);
      access.template store<kFloat>(at.master, i, p);
      return p;
    };
    std::size_t i = begin;
    for (; i + kStripNumel <= end; i += kStripNumel) {
      prefetch<kFloat, kStripNumel>(at.master, i);
      prefetch<kFloat, kStripNumel>(at.exp_avg, i);
      prefetch<kFloat, kStripNumel>(at.exp_avg_sq, i);
      prefetch<kGradient, kStripNumel>(at.gradient, i);
      Float strip[kStripNumel / Simd::kLanes];
#pragma GCC unroll 8
      for (std::size_t k = 0; k < kStripNumel / Simd::kLanes; ++k) {
        strip[k] = update(Whole<Simd>{}, i + k * Simd::kLanes);
      }
      if constexpr (kHasLow) {
#pragma GCC unroll 8
        for (std::size_t k = 0; k < kStripNumel / Simd::kLanes; ++k) {
          Access{}.template store<kLow>(at.low_precision, i + k * Simd::kLanes, strip[k]);
        }
      }
    }
    for_each_register<Simd>(i, end, [&](auto access, std::size_t j) __attribute__((always_inline)) {
      const Float p = update(access, j);
      if constexpr (kHasLow) access.template store<kLow>(at.low_precision, j, p);
    });
  }

  static void adam_mix(const AdamSpan& span) {
    with_dtype(span.gradient_dtype, [&]<DType kGradient>() {
      if (span.low_precision == nullptr) {
        return mix_range<kGradient, kFloat, false, Whole<Simd>>(span, 0, span.numel);
      }
      if (span.low_precision_dtype == kFloat) return mix_with_low<kGradient, kFloat>(span);
      mix_with_low<kGradient, DType::kFloat16>(span);  // one instruction converts; the traffic is that of bf16
    });
  }

  template <DType kGradient, DType kLow>
  static void mix_with_low(const AdamSpan& span) {
    const std::size_t head = numel_to_line(span.low_precision, bytes_of<kLow>(), span.numel);
    mix_range<kGradient, kLow, true, Whole<Simd>>(span, 0, head);
    mix_range<kGradient, kLow, true, Streamed<Simd>>(span, head, span.numel);
    Simd::stream_fence();
  }

  static void triad(float* destination, const float* a, const float* b, float factor, std::size_t numel) {
    const Float scale = Simd::set(factor);
    const auto body = [=](auto access, std::size_t i) __attribute__((always_inline)) {
      const Float product = Simd::mul(scale, access.template load<kFloat>(b, i));
      access.template store<kFloat>(destination, i, Simd::add(access.template load<kFloat>(a, i), product));
    };
    constexpr std::size_t kStripNumel = 32;
    std::size_t i = numel_to_line(destination, sizeof(float), numel);
    for_each_register<Simd>(0, i, body);
    for (; i + kStripNumel <= numel; i += kStripNumel) {
      prefetch<kFloat, kStripNumel>(a, i);
      prefetch<kFloat, kStripNumel>(b, i);
#pragma GCC unroll 8
      for (std::size_t k = 0; k < kStripNumel; k += Simd::kLanes) body(Streamed<Simd>{}, i + k);
    }
    for_each_register<Simd>(i, numel, body);
    Simd::stream_fence();
  }
};

}  // namespace
}  // namespace zb
