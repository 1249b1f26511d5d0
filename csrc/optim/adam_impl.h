// The vector forms of the Adam step, written once over a register type (common/simd_*.h).
#pragma once

#include "common/dtype_dispatch.h"
#include "common/ieee_scope.h"
#include "common/simd_loop.h"
#include "optim/adam.h"

namespace zb {
namespace {  // internal linkage: included by sources with different instruction set flags

template <class Simd, DType kGradient, DType kLow, bool kHasLow, bool kL2>
struct VectorAdam {
  using Float = typename Simd::Float;

  // Low-precision outputs from here up pass the caches: with the four other arrays they would not stay in them.
  static constexpr std::size_t kStreamNumel = std::size_t{1} << 15;
  static constexpr std::size_t kStripNumel = 32;  // one cache line of 16-bit output

  struct Constants {
    explicit Constants(const AdamScalars& s)
        : beta1(Simd::set(s.beta1)),
          one_minus_beta1(Simd::set(s.one_minus_beta1)),
          beta2(Simd::set(s.beta2)),
          one_minus_beta2(Simd::set(s.one_minus_beta2)),
          eps(Simd::set(s.eps)),
          inv_sqrt_bias2(Simd::set(s.inv_sqrt_bias2)),
          minus_step_size(Simd::set(-s.step_size)),
          decay_factor(Simd::set(s.decay_factor)),
          l2(Simd::set(s.l2)),
          grad_factor(Simd::set(s.grad_factor)) {}

    Float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, inv_sqrt_bias2, minus_step_size, decay_factor, l2,
        grad_factor;
  };

  // The sequence of adam_scalar.cpp on one register; returns the new master.
  template <class Access>
  ZB_ALWAYS_INLINE static Float update(Access access, const AdamSpan& span, const Constants& c, std::size_t i) {
    constexpr DType kState = DType::kFloat32;
    Float p = access.template load<kState>(span.master, i);
    Float g = Simd::mul(access.template load<kGradient>(span.gradient, i), c.grad_factor);
    if constexpr (kL2) g = Simd::fma(c.l2, p, g);
    const Float m = Simd::fma(c.beta1, access.template load<kState>(span.exp_avg, i), Simd::mul(c.one_minus_beta1, g));
    const Float v = Simd::fma(c.beta2, access.template load<kState>(span.exp_avg_sq, i),
                              Simd::mul(Simd::mul(c.one_minus_beta2, g), g));
    const Float d = Simd::fma(Simd::sqrt(v), c.inv_sqrt_bias2, c.eps);
    p = Simd::mul(p, c.decay_factor);
    p = Simd::fma(c.minus_step_size, Simd::div(m, d), p);
    access.template store<kState>(span.exp_avg, i, m);
    access.template store<kState>(span.exp_avg_sq, i, v);
    access.template store<kState>(span.master, i, p);
    return p;
  }

  [[gnu::noinline]] static void registers(const AdamSpan& span, const AdamScalars& scalars, std::size_t begin,
                                          std::size_t end) {
    const AdamSpan at = span;
    const Constants c(scalars);
    for_each_register<Simd>(begin, end, [&](auto access, std::size_t i) __attribute__((always_inline)) {
      const Float p = update(access, at, c, i);
      if constexpr (kHasLow) access.template store<kLow>(at.low_precision, i, p);
    });
  }

  // Whole strips; Access is how the low-precision output is stored. Returns where it stopped.
  template <class Access>
  [[gnu::noinline]] static std::size_t strips(const AdamSpan& span, const AdamScalars& scalars, std::size_t begin) {
    constexpr std::size_t kRegisterNum = kStripNumel / Simd::kLanes;
    const AdamSpan at = span;
    const Constants c(scalars);
    std::size_t i = begin;
    for (; i + kStripNumel <= at.numel; i += kStripNumel) {
      prefetch<DType::kFloat32, kStripNumel>(at.master, i);
      prefetch<DType::kFloat32, kStripNumel>(at.exp_avg, i);
      prefetch<DType::kFloat32, kStripNumel>(at.exp_avg_sq, i);
      prefetch<kGradient, kStripNumel>(at.gradient, i);
      Float strip[kRegisterNum];
#pragma GCC unroll 8
      for (std::size_t k = 0; k < kRegisterNum; ++k) strip[k] = update(Whole<Simd>{}, at, c, i + k * Simd::kLanes);
      if constexpr (kHasLow) {
#pragma GCC unroll 8
        for (std::size_t k = 0; k < kRegisterNum; ++k) {
          Access{}.template store<kLow>(at.low_precision, i + k * Simd::kLanes, strip[k]);
        }
      }
    }
    return i;
  }

  static void run(const AdamSpan& span, const AdamScalars& scalars) {
    std::size_t done = 0;
    if (kHasLow && span.numel >= kStreamNumel) {
      done = numel_to_line(span.low_precision, bytes_of<kLow>(), span.numel);
      registers(span, scalars, 0, done);
      done = strips<Streamed<Simd>>(span, scalars, done);
      Simd::stream_fence();
    } else {
      done = strips<Whole<Simd>>(span, scalars, 0);
    }
    registers(span, scalars, done, span.numel);
  }
};

template <class Simd>
void vector_adam(const AdamSpan& span, const AdamScalars& scalars) {
  const IeeeScope scope;
  with_dtype(span.gradient_dtype, [&]<DType kGradient>() {
    const auto with_low = [&]<DType kLow, bool kHasLow>() {
      if (scalars.l2 != 0.0F) return VectorAdam<Simd, kGradient, kLow, kHasLow, true>::run(span, scalars);
      return VectorAdam<Simd, kGradient, kLow, kHasLow, false>::run(span, scalars);
    };
    if (span.low_precision == nullptr) return with_low.template operator()<DType::kFloat32, false>();
    with_dtype(span.low_precision_dtype, [&]<DType kLow>() { with_low.template operator()<kLow, true>(); });
  });
}

}  // namespace
}  // namespace zb
