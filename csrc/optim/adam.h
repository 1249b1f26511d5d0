// AdamW and Adam on flat shards: one written sequence of IEEE operations
// (docs/decisions/0001-one-sequence-for-adam.md), many forms.
//
// Every form (scalar, NEON, AVX2, AVX-512, CUDA) gives the same bits: `fma` exactly where written, round to nearest,
// no reassociation, no flush to zero. The scalar form is the reference.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cpu_features.h"
#include "common/dtype.h"
#include "common/thread_pool.h"

namespace zb {

// Pieces of whole pages of every array; a smaller span is not worth waking a thread for.
inline constexpr std::size_t kAdamGrainNumel = 4096;

enum class WeightDecayKind : unsigned char { kDecoupled, kL2 };

// Hyperparameters of one param group, as a user states them.
struct AdamHyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  WeightDecayKind kind = WeightDecayKind::kDecoupled;
};

// What the element loop reads: formed in double, rounded to float once.
struct AdamScalars {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
  float step_size;       // lr / (1 - beta1^step)
  float decay_factor;    // 1 - lr * weight_decay (decoupled), else 1
  float l2;              // weight_decay of kL2, else 0
  float grad_factor;     // one multiply on every incoming gradient: averaging, unscaling and clipping
};

// `step` counts from 1. Throws ArgumentError for betas outside [0, 1), negative lr, eps or weight_decay, or step 0.
AdamScalars make_adam_scalars(const AdamHyperparameters& hyperparameters, long step, float grad_factor);

// One contiguous run of a shard. `low_precision` may be null; `gradient` is left as it was.
struct AdamSpan {
  float* master;  // null where there are remainders
  float* exp_avg;
  float* exp_avg_sq;
  const void* gradient;
  DType gradient_dtype;
  void* low_precision;  // receives master rounded to low_precision_dtype, past the caches where large
  DType low_precision_dtype;
  std::size_t numel;
  // Instead of masters ([Note: remainders] in master_remainder.h), whose rounding low_precision (bfloat16) holds before
  // the step, too. Forms of instruction sets do not take them, adam_step does.
  std::uint16_t* remainder = nullptr;
};

using AdamFunction = void (*)(const AdamSpan& span, const AdamScalars& scalars);

// The masters of a span with remainders, into `destination`; and from `source`, whose rounding low_precision holds.
void read_masters(const AdamSpan& span, float* destination);
void write_masters(const AdamSpan& span, const float* source);
// destination[i] = source[i] with the sign of signs[i], or positive where that is null. The ranges may be the same.
void copy_magnitudes(float* destination, const float* source, const float* signs, std::size_t numel);

// Elements [begin, end) of a span, as a span.
AdamSpan adam_subspan(const AdamSpan& span, std::size_t begin, std::size_t end);

// The single-threaded form for an instruction set; throws ArgumentError where this machine or build lacks it.
AdamFunction adam_function(Isa isa);

// Splits the span over the pool's threads (cache-line multiples) and runs the best form. Results do not depend on the
// split.
void adam_step(const AdamSpan& span, const AdamScalars& scalars, ThreadPool& pool);

}  // namespace zb
