// The scalar form: the reference that every vector form equals bit for bit.
//
// std::fma is one rounding whatever the machine (without FMA instructions libm computes it in software).
#include <cmath>

#include "common/dtype_dispatch.h"
#include "common/ieee_scope.h"
#include "common/simd_scalar.h"
#include "optim/adam_forms.h"

namespace zb {
namespace {

template <DType kGradient>
[[gnu::noinline]] void adam_loop(const AdamSpan& span, const AdamScalars& s) {
  for (std::size_t i = 0; i < span.numel; ++i) {
    float p = span.master[i];
    float g = scalar::load<kGradient>(span.gradient, i) * s.grad_factor;
    if (s.l2 != 0.0F) g = std::fma(s.l2, p, g);
    const float m = std::fma(s.beta1, span.exp_avg[i], s.one_minus_beta1 * g);
    const float v = std::fma(s.beta2, span.exp_avg_sq[i], (s.one_minus_beta2 * g) * g);
    const float d = std::fma(std::sqrt(v), s.inv_sqrt_bias2, s.eps);
    p = p * s.decay_factor;
    p = std::fma(-s.step_size, m / d, p);
    span.exp_avg[i] = m;
    span.exp_avg_sq[i] = v;
    span.master[i] = p;
    if (span.low_precision != nullptr) {
      with_dtype(span.low_precision_dtype, [&]<DType kLow>() { scalar::store<kLow>(span.low_precision, i, p); });
    }
  }
}

}  // namespace

void adam_scalar(const AdamSpan& span, const AdamScalars& scalars) {
  const IeeeScope scope;
  with_dtype(span.gradient_dtype, [&]<DType kGradient>() { adam_loop<kGradient>(span, scalars); });
}

}  // namespace zb
