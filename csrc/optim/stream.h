// Memory streams: the limits that the Adam step is held against, measured in the same run on the same arrays.
//
// Both use the best vector form of this machine and split the arrays over the pool as adam_step does.
#pragma once

#include <cstddef>

#include "common/thread_pool.h"
#include "optim/adam.h"

namespace zb {

// The traffic of an Adam step with trivial arithmetic: master, exp_avg and exp_avg_sq read and written in place, the
// gradient read, the low-precision output (where the span has one) written past the caches. Overwrites the four
// outputs with values of no meaning.
void stream_adam_mix(const AdamSpan& span, ThreadPool& pool);
// Bytes that adam_step and stream_adam_mix move for this span: 24 + gradient + low-precision bytes per element.
std::size_t adam_mix_bytes(const AdamSpan& span) noexcept;

// destination[i] = a[i] + factor * b[i], destination written past the caches: 12 bytes per element, no write-allocate.
void stream_triad(float* destination, const float* a, const float* b, float factor, std::size_t numel,
                  ThreadPool& pool);

}  // namespace zb
