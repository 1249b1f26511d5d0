#include "optim/adam.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "common/error.h"
#include "optim/adam_forms.h"
#include "optim/master_remainder.h"

namespace zb {
namespace {

void expect_beta(const char* name, double beta) {
  ZB_EXPECT(beta >= 0.0 && beta < 1.0, std::string(name) + " must be in [0, 1), got " + std::to_string(beta));
}

void expect_not_negative(const char* name, double value) {
  ZB_EXPECT(value >= 0.0 && std::isfinite(value),
            std::string(name) + " must be finite and not negative, got " + std::to_string(value));
}

const void* gradient_at(const AdamSpan& span, std::size_t index) {
  return static_cast<const char*>(span.gradient) + index * dtype_bytes(span.gradient_dtype);
}

void* low_precision_at(const AdamSpan& span, std::size_t index) {
  if (span.low_precision == nullptr) return nullptr;
  return static_cast<char*>(span.low_precision) + index * dtype_bytes(span.low_precision_dtype);
}

// By pieces whose masters a small buffer holds.
void step_remainders(AdamFunction form, const AdamSpan& span, const AdamScalars& scalars) {
  constexpr std::size_t kPieceNumel = 1024;
  alignas(64) std::array<float, kPieceNumel> masters;
  for (std::size_t begin = 0; begin < span.numel; begin += kPieceNumel) {
    const AdamSpan piece = adam_subspan(span, begin, std::min(begin + kPieceNumel, span.numel));
    read_masters(piece, masters.data());
    copy_magnitudes(piece.exp_avg_sq, piece.exp_avg_sq, nullptr, piece.numel);
    AdamSpan whole = piece;
    whole.master = masters.data();
    whole.remainder = nullptr;
    form(whole, scalars);
    write_masters(piece, masters.data());
  }
}

}  // namespace

void read_masters(const AdamSpan& span, float* destination) {
  const auto* rounded = static_cast<const std::uint16_t*>(span.low_precision);
  for (std::size_t i = 0; i < span.numel; ++i) {
    const bool is_up = std::signbit(span.exp_avg_sq[i]);
    destination[i] = std::bit_cast<float>(join_master(rounded[i], span.remainder[i], is_up));
  }
}

void write_masters(const AdamSpan& span, const float* source) {
  const auto* rounded = static_cast<const std::uint16_t*>(span.low_precision);
  for (std::size_t i = 0; i < span.numel; ++i) {
    const auto master = std::bit_cast<std::uint32_t>(source[i]);
    const auto square = std::bit_cast<std::uint32_t>(span.exp_avg_sq[i]);
    span.remainder[i] = remainder_of(master);
    span.exp_avg_sq[i] = std::bit_cast<float>(with_sign(square, is_rounded_up(master, rounded[i])));
  }
}

void copy_magnitudes(float* destination, const float* source, const float* signs, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const bool is_negative = signs != nullptr && std::signbit(signs[i]);
    destination[i] = std::bit_cast<float>(with_sign(std::bit_cast<std::uint32_t>(source[i]), is_negative));
  }
}

AdamSpan adam_subspan(const AdamSpan& span, std::size_t begin, std::size_t end) {
  return {.master = span.master == nullptr ? nullptr : span.master + begin,
          .exp_avg = span.exp_avg + begin,
          .exp_avg_sq = span.exp_avg_sq + begin,
          .gradient = gradient_at(span, begin),
          .gradient_dtype = span.gradient_dtype,
          .low_precision = low_precision_at(span, begin),
          .low_precision_dtype = span.low_precision_dtype,
          .numel = end - begin,
          .remainder = span.remainder == nullptr ? nullptr : span.remainder + begin};
}

AdamScalars make_adam_scalars(const AdamHyperparameters& h, long step, float grad_factor) {
  expect_beta("beta1", h.beta1);
  expect_beta("beta2", h.beta2);
  expect_not_negative("lr", h.lr);
  expect_not_negative("eps", h.eps);
  expect_not_negative("weight_decay", h.weight_decay);
  ZB_EXPECT(step >= 1, "the Adam step counts from 1, got " + std::to_string(step));
  const double bias1 = 1.0 - std::pow(h.beta1, static_cast<double>(step));
  const double bias2 = 1.0 - std::pow(h.beta2, static_cast<double>(step));
  const bool decoupled = h.kind == WeightDecayKind::kDecoupled;
  return {.beta1 = static_cast<float>(h.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - h.beta1),
          .beta2 = static_cast<float>(h.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - h.beta2),
          .eps = static_cast<float>(h.eps),
          .inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2)),
          .step_size = static_cast<float>(h.lr / bias1),
          .decay_factor = decoupled ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0F,
          .l2 = decoupled ? 0.0F : static_cast<float>(h.weight_decay),
          .grad_factor = grad_factor};
}

AdamFunction adam_function(Isa isa) {
  const auto& isas = available_isas();
  if (std::find(isas.begin(), isas.end(), isa) != isas.end()) {
    switch (isa) {
#if defined(__x86_64__)
      case Isa::kAvx2:
        return adam_avx2;
      case Isa::kAvx512:
        return adam_avx512;
#elif defined(__aarch64__)
      case Isa::kNeon:
        return adam_neon;
#endif
      case Isa::kScalar:
        return adam_scalar;
      default:
        break;
    }
  }
  throw ArgumentError("this machine has no " + std::string(isa_name(isa)) + " instructions; choose one of " +
                      "zb::available_isas()");
}

void adam_step(const AdamSpan& span, const AdamScalars& scalars, ThreadPool& pool) {
  static const AdamFunction best = adam_function(best_isa());
  pool.parallel_for(span.numel, kAdamGrainNumel, [&](std::size_t begin, std::size_t end) {
    const AdamSpan piece = adam_subspan(span, begin, end);
    if (piece.remainder != nullptr) {
      step_remainders(best, piece, scalars);
    } else {
      best(piece, scalars);
    }
  });
}

}  // namespace zb
