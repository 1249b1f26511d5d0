// The forms for machines without a vector instruction set that this build knows; compilers vectorise the float loops.
#include "common/dtype_dispatch.h"
#include "common/simd_scalar.h"
#include "optim/stream_forms.h"

namespace zb {
namespace {

void adam_mix(const AdamSpan& span) {
  with_dtype(span.gradient_dtype, [&]<DType kGradient>() {
    with_dtype(span.low_precision_dtype, [&]<DType kLow>() {
      for (std::size_t i = 0; i < span.numel; ++i) {
        const float g = scalar::load<kGradient>(span.gradient, i);
        span.exp_avg[i] += g;
        span.exp_avg_sq[i] += g;
        span.master[i] += g;
        if (span.low_precision != nullptr) scalar::store<kLow>(span.low_precision, i, span.master[i]);
      }
    });
  });
}

void triad(float* destination, const float* a, const float* b, float factor, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) destination[i] = a[i] + factor * b[i];
}

}  // namespace

const StreamForms kScalarStreams{adam_mix, triad};

}  // namespace zb
