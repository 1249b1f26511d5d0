// The arithmetic of Device::combine_norm, for CPU and CUDA.
#pragma once

#include <cmath>
#include <cstddef>

#include "common/host_device.h"
#include "kernels/device.h"

namespace zb {

ZB_HOST_DEVICE inline double sum_over_ranks(const NormArguments& arguments, std::size_t flat) {
  double sum = 0.0;
  for (std::size_t rank = 0; rank < arguments.rank_num; ++rank) {
    sum += arguments.partial_sums[rank * arguments.flat_num + flat];
  }
  return sum;
}

ZB_HOST_DEVICE inline void write_step_scalars(const NormArguments& arguments, double total) {
  const double norm = std::sqrt(total) / arguments.divisor;
  double factor = 1.0 / arguments.divisor;
  if (arguments.clip > 0.0 && arguments.clip < norm + 1e-6) factor *= arguments.clip / (norm + 1e-6);
  arguments.scalars->norm = norm;
  arguments.scalars->factor = static_cast<float>(factor);
  arguments.scalars->is_skipped = std::isfinite(total) ? 0 : 1;
}

inline void combine_partial_sums(const NormArguments& arguments) {
  double total = 0.0;
  for (std::size_t flat = 0; flat < arguments.flat_num; ++flat) {
    arguments.flat_sums[flat] = sum_over_ranks(arguments, flat);
    total += arguments.flat_sums[flat];
  }
  write_step_scalars(arguments, total);
}

}  // namespace zb
