#include "optim/stream.h"

#include "optim/stream_forms.h"

namespace zb {
namespace {

const StreamForms& best_forms() {
  static const StreamForms& best = [&]() -> const StreamForms& {
    switch (best_isa()) {
#if defined(__x86_64__)
      case Isa::kAvx2:
        return kAvx2Streams;
      case Isa::kAvx512:
        return kAvx512Streams;
#elif defined(__aarch64__)
      case Isa::kNeon:
        return kNeonStreams;
#endif
      default:
        return kScalarStreams;
    }
  }();
  return best;
}

}  // namespace

void stream_adam_mix(const AdamSpan& span, ThreadPool& pool) {
  const StreamForms& forms = best_forms();
  pool.parallel_for(span.numel, kAdamGrainNumel,
                    [&](std::size_t begin, std::size_t end) { forms.adam_mix(adam_subspan(span, begin, end)); });
}

std::size_t adam_mix_bytes(const AdamSpan& span) noexcept {
  const std::size_t low_bytes = span.low_precision == nullptr ? 0 : dtype_bytes(span.low_precision_dtype);
  return span.numel * (6 * sizeof(float) + dtype_bytes(span.gradient_dtype) + low_bytes);
}

void stream_triad(float* destination, const float* a, const float* b, float factor, std::size_t numel,
                  ThreadPool& pool) {
  const StreamForms& forms = best_forms();
  pool.parallel_for(numel, kAdamGrainNumel, [&](std::size_t begin, std::size_t end) {
    forms.triad(destination + begin, a + begin, b + begin, factor, end - begin);
  });
}

}  // namespace zb
