#include "optim/adam.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "common/error.h"
#include "float_support.h"
#include "kernels/cpu_kernels.h"

namespace zb {
namespace {

using test::Elements;
using test::kDTypes;
using test::mixed_floats;
using test::ordinary_floats;
using test::same_bits;

std::vector<std::size_t> sizes() {
  std::vector<std::size_t> numels;
  for (std::size_t numel = 0; numel <= 70; ++numel) numels.push_back(numel);
  for (const std::size_t numel : {127, 1000, 32767, 32768 + 77}) numels.push_back(numel);
  return numels;
}

// Everything that one step reads and writes, at unaligned addresses.
struct Arrays {
  Elements master, exp_avg, exp_avg_sq, gradient, low;

  Arrays(DType gradient_dtype, DType low_dtype, std::size_t numel, std::uint32_t seed, bool special)
      : master(DType::kFloat32, values(numel, seed, special), seed % 7),
        exp_avg(DType::kFloat32, values(numel, seed + 1, special), seed % 3),
        exp_avg_sq(DType::kFloat32, squares(numel, seed + 2, special), seed % 5),
        gradient(gradient_dtype, values(numel, seed + 3, special), seed % 4),
        low(low_dtype, numel, seed % 11) {}

  AdamSpan span(bool with_low) {
    return {.master = static_cast<float*>(master.data()),
            .exp_avg = static_cast<float*>(exp_avg.data()),
            .exp_avg_sq = static_cast<float*>(exp_avg_sq.data()),
            .gradient = gradient.data(),
            .gradient_dtype = gradient.dtype(),
            .low_precision = with_low ? low.data() : nullptr,
            .low_precision_dtype = low.dtype(),
            .numel = master.numel()};
  }

  static std::vector<float> values(std::size_t numel, std::uint32_t seed, bool special) {
    return special ? mixed_floats(numel, seed) : ordinary_floats(numel, seed);
  }
  static std::vector<float> squares(std::size_t numel, std::uint32_t seed, bool special) {
    std::vector<float> result = values(numel, seed, special);
    for (std::size_t i = 0; i < numel; ++i) {
      if (!special || i % 8 != 0) result[i] = std::fabs(result[i]);  // a negative one makes NaN in every form
    }
    return result;
  }
};

void expect_equal(const Arrays& actual, const Arrays& expected, const std::string& what) {
  ASSERT_EQ(actual.exp_avg.first_difference(expected.exp_avg), -1) << "exp_avg " << what;
  ASSERT_EQ(actual.exp_avg_sq.first_difference(expected.exp_avg_sq), -1) << "exp_avg_sq " << what;
  ASSERT_EQ(actual.master.first_difference(expected.master), -1) << "master " << what;
  ASSERT_EQ(actual.low.first_difference(expected.low), -1) << "low precision " << what;
  ASSERT_EQ(actual.gradient.first_difference(expected.gradient), -1) << "gradient " << what;
}

AdamHyperparameters some_hyperparameters(WeightDecayKind kind) {
  return {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .kind = kind};
}

class EveryAdam : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(Adam, EveryAdam, testing::ValuesIn(available_isas()), test::IsaLabel{});

// The sequence of docs/decisions/0001-one-sequence-for-adam.md, once more and apart from the code under test.
void written_step(Arrays& a, const AdamScalars& s, bool with_low) {
  for (std::size_t i = 0; i < a.master.numel(); ++i) {
    float p = a.master.get(i);
    float g = a.gradient.get(i) * s.grad_factor;
    if (s.l2 != 0.0F) g = std::fma(s.l2, p, g);
    const float m = std::fma(s.beta1, a.exp_avg.get(i), s.one_minus_beta1 * g);
    const float v = std::fma(s.beta2, a.exp_avg_sq.get(i), (s.one_minus_beta2 * g) * g);
    const float d = std::fma(std::sqrt(v), s.inv_sqrt_bias2, s.eps);
    p *= s.decay_factor;
    p = std::fma(-s.step_size, m / d, p);
    a.exp_avg.set(i, m);
    a.exp_avg_sq.set(i, v);
    a.master.set(i, p);
    if (with_low) a.low.set(i, p);
  }
}

TEST_P(EveryAdam, FollowsTheWrittenSequenceAtEveryLength) {
  const AdamFunction step = adam_function(GetParam());
  std::uint32_t seed = 0;
  for (const DType gradient_dtype : kDTypes) {
    for (const DType low_dtype : kDTypes) {
      for (const std::size_t numel : sizes()) {
        ++seed;
        const auto kind = seed % 2 == 0 ? WeightDecayKind::kDecoupled : WeightDecayKind::kL2;
        const bool with_low = seed % 4 != 0;
        const AdamScalars scalars = make_adam_scalars(some_hyperparameters(kind), 1 + seed % 9, 0.37F);
        Arrays expected(gradient_dtype, low_dtype, numel, seed, seed % 5 != 0);
        Arrays actual = expected;
        written_step(expected, scalars, with_low);
        step(actual.span(with_low), scalars);
        expect_equal(actual, expected, std::to_string(numel) + " seed " + std::to_string(seed));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(EveryAdam, SpecialValuesMeetEachOther) {
  const std::vector<float> specials = test::special_floats();
  const std::size_t side = specials.size();
  for (const float factor : {1.0F, 1.0F / 65536.0F}) {
    for (const double eps : {1e-8, 0.0}) {
      AdamHyperparameters h = some_hyperparameters(WeightDecayKind::kDecoupled);
      h.eps = eps;
      const AdamScalars scalars = make_adam_scalars(h, 1, factor);
      Arrays expected(DType::kFloat32, DType::kBFloat16, side * side, 0, false);
      for (std::size_t i = 0; i < side * side; ++i) {
        expected.gradient.set(i, specials[i % side]);
        expected.exp_avg_sq.set(i, std::fabs(specials[i / side]));
        expected.exp_avg.set(i, specials[(i * 7) % side]);
        expected.master.set(i, specials[(i * 5 + 3) % side]);
      }
      Arrays actual = expected;
      written_step(expected, scalars, true);
      adam_function(GetParam())(actual.span(true), scalars);
      expect_equal(actual, expected, "specials");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(EveryAdam, StaysNearTheExactStep) {
  constexpr std::size_t kNumel = 1000;
  const AdamHyperparameters h = some_hyperparameters(WeightDecayKind::kDecoupled);
  Arrays arrays(DType::kFloat32, DType::kFloat32, kNumel, 3, false);
  const Arrays before = arrays;
  const long step = 7;
  adam_function(GetParam())(arrays.span(false), make_adam_scalars(h, step, 0.5F));
  for (std::size_t i = 0; i < kNumel; ++i) {
    const double g = 0.5 * before.gradient.get(i);
    const double m = h.beta1 * before.exp_avg.get(i) + (1 - h.beta1) * g;
    const double v = h.beta2 * before.exp_avg_sq.get(i) + (1 - h.beta2) * g * g;
    const double d = std::sqrt(v / (1 - std::pow(h.beta2, step))) + h.eps;
    const double step_size = h.lr / (1 - std::pow(h.beta1, step));
    const double p = before.master.get(i) * (1 - h.lr * h.weight_decay) - step_size * m / d;
    const double u = 0x1p-24;
    const double m_scale = std::fabs(before.exp_avg.get(i)) + std::fabs(g);
    ASSERT_LE(std::fabs(arrays.exp_avg.get(i) - m), 4 * u * m_scale) << i;
    ASSERT_LE(std::fabs(arrays.exp_avg_sq.get(i) - v), 4 * u * v) << i;
    ASSERT_LE(std::fabs(arrays.master.get(i) - p), 8 * u * (std::fabs(p) + step_size * m_scale / d)) << i;
  }
}

TEST_P(EveryAdam, ZerosStayZero) {
  Arrays arrays(DType::kBFloat16, DType::kBFloat16, 100, 0, false);
  for (Elements* elements : {&arrays.master, &arrays.exp_avg, &arrays.exp_avg_sq, &arrays.gradient}) {
    for (std::size_t i = 0; i < 100; ++i) elements->set(i, 0.0F);
  }
  const Arrays before = arrays;
  adam_function(GetParam())(arrays.span(true),
                            make_adam_scalars(some_hyperparameters(WeightDecayKind::kDecoupled), 1, 1.0F));
  for (std::size_t i = 0; i < 100; ++i) {
    ASSERT_EQ(arrays.master.get(i), 0.0F);
    ASSERT_EQ(arrays.exp_avg.get(i), 0.0F);
    ASSERT_EQ(arrays.exp_avg_sq.get(i), 0.0F);
    ASSERT_EQ(arrays.low.get(i), 0.0F);
  }
}

#if defined(__x86_64__)
TEST_P(EveryAdam, DoesNotDependOnFlushToZero) {
  const AdamScalars scalars = make_adam_scalars(some_hyperparameters(WeightDecayKind::kDecoupled), 3, 1.0F);
  Arrays expected(DType::kFloat32, DType::kBFloat16, 333, 2, true);
  for (std::size_t i = 0; i < 333; i += 3) {
    expected.gradient.set(i, 1e-22F);  // squares to a denormal
    expected.exp_avg_sq.set(i, 0x1p-135F);
  }
  Arrays actual = expected;
  adam_function(GetParam())(expected.span(true), scalars);
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040 | 0x4000);  // flush to zero, denormals are zero, round up
  adam_function(GetParam())(actual.span(true), scalars);
  __builtin_ia32_ldmxcsr(before);
  EXPECT_NE(actual.exp_avg_sq.get(0), 0.0F);
  expect_equal(actual, expected, "flush to zero");
}
#endif

TEST(AdamStep, ResultsDoNotDependOnTheThreads) {
  constexpr std::size_t kNumel = 50001;
  const AdamScalars scalars = make_adam_scalars(some_hyperparameters(WeightDecayKind::kDecoupled), 3, 0.25F);
  Arrays expected(DType::kBFloat16, DType::kFloat16, kNumel, 8, true);
  const Arrays start = expected;
  adam_function(Isa::kScalar)(expected.span(true), scalars);
  for (const std::size_t thread_num : {1, 2, 3, 5}) {
    ThreadPool pool(thread_num);
    Arrays actual = start;
    adam_step(actual.span(true), scalars, pool);
    expect_equal(actual, expected, std::to_string(thread_num) + " threads");
  }
}

TEST(AdamScalars, AreFormedInDoubleAndRoundedOnce) {
  const AdamHyperparameters h{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
  const AdamScalars s = make_adam_scalars(h, 2, 0.5F);
  EXPECT_EQ(s.beta1, 0.9F);
  EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1.0 - 0.9));
  EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1.0 - 0.999));
  EXPECT_NE(s.one_minus_beta2, 1.0F - 0.999F);  // what float arithmetic would give
  EXPECT_EQ(s.inv_sqrt_bias2, static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(0.999, 2.0))));
  EXPECT_EQ(s.step_size, static_cast<float>(1e-3 / (1.0 - std::pow(0.9, 2.0))));
  EXPECT_EQ(s.decay_factor, static_cast<float>(1.0 - 1e-3 * 0.01));
  EXPECT_EQ(s.l2, 0.0F);
  EXPECT_EQ(s.grad_factor, 0.5F);
  AdamHyperparameters l2 = h;
  l2.kind = WeightDecayKind::kL2;
  EXPECT_EQ(make_adam_scalars(l2, 2, 1.0F).decay_factor, 1.0F);
  EXPECT_EQ(make_adam_scalars(l2, 2, 1.0F).l2, 0.01F);
}

TEST(AdamScalars, RejectsWhatCannotBe) {
  const auto with = [](auto change) {
    AdamHyperparameters h;
    change(h);
    return h;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double beta : {-0.1, 1.0, 1.5, nan}) {
    EXPECT_THROW(make_adam_scalars(with([&](auto& h) { h.beta1 = beta; }), 1, 1.0F), ArgumentError);
    EXPECT_THROW(make_adam_scalars(with([&](auto& h) { h.beta2 = beta; }), 1, 1.0F), ArgumentError);
  }
  for (const double bad : {-1e-9, nan, std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(make_adam_scalars(with([&](auto& h) { h.lr = bad; }), 1, 1.0F), ArgumentError);
    EXPECT_THROW(make_adam_scalars(with([&](auto& h) { h.eps = bad; }), 1, 1.0F), ArgumentError);
    EXPECT_THROW(make_adam_scalars(with([&](auto& h) { h.weight_decay = bad; }), 1, 1.0F), ArgumentError);
  }
  EXPECT_THROW(make_adam_scalars({}, 0, 1.0F), ArgumentError);
  EXPECT_NO_THROW(make_adam_scalars(with([](auto& h) { h.beta1 = h.beta2 = h.lr = h.eps = 0.0; }), 1, 1.0F));
}

// Every upper half, beside lower halves at which rounding turns: all masters come back as they were.
TEST(Remainders, GiveBackEveryMaster) {
  constexpr std::size_t kUpperNum = 1U << 16U;
  std::vector<float> masters(kUpperNum);
  std::vector<float> found(kUpperNum);
  std::vector<float> squares(kUpperNum);
  std::vector<std::uint16_t> rounded(kUpperNum);
  std::vector<std::uint16_t> remainders(kUpperNum);
  AdamSpan span{.master = nullptr,
                .exp_avg = nullptr,
                .exp_avg_sq = squares.data(),
                .gradient = nullptr,
                .gradient_dtype = DType::kFloat32,
                .low_precision = rounded.data(),
                .low_precision_dtype = DType::kBFloat16,
                .numel = kUpperNum,
                .remainder = remainders.data()};
  for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x3A5CU, 0x7FFFU, 0x8000U, 0x8001U, 0xC3A5U, 0xFFFFU}) {
    for (std::uint32_t upper = 0; upper < kUpperNum; ++upper) {
      masters[upper] = std::bit_cast<float>((upper << 16U) | lower);
      squares[upper] = upper % 2 == 0 ? 0.25F : -0.25F;  // of a master before
    }
    cpu_kernels().cast(rounded.data(), DType::kBFloat16, masters.data(), DType::kFloat32, kUpperNum);
    write_masters(span, masters.data());
    read_masters(span, found.data());
    for (std::uint32_t upper = 0; upper < kUpperNum; ++upper) {
      ASSERT_TRUE(same_bits(found[upper], masters[upper])) << std::hex << upper << " " << lower;
      ASSERT_EQ(std::fabs(squares[upper]), 0.25F);
    }
  }
}

TEST(Remainders, MagnitudesKeepTheSignsThatAreAskedFor) {
  const std::vector<float> source{1.0F, -2.0F, 0.0F, -0.0F, INFINITY};
  std::vector<float> destination(source.size());
  copy_magnitudes(destination.data(), source.data(), nullptr, source.size());
  for (std::size_t i = 0; i < source.size(); ++i) EXPECT_TRUE(same_bits(destination[i], std::fabs(source[i])));
  const std::vector<float> signs{-0.0F, 3.0F, -1.0F, 0.0F, -5.0F};
  copy_magnitudes(destination.data(), source.data(), signs.data(), source.size());
  const std::vector<float> wanted{-1.0F, 2.0F, -0.0F, 0.0F, -INFINITY};
  for (std::size_t i = 0; i < source.size(); ++i) EXPECT_TRUE(same_bits(destination[i], wanted[i])) << i;
}

TEST(Remainders, AStepIsThatOfWholeMasters) {
  std::uint32_t seed = 0;
  for (const DType gradient_dtype : kDTypes) {
    for (const std::size_t numel : {0, 1, 15, 1023, 1024, 1025, 9000, 40'003}) {
      for (const std::size_t thread_num : {1, 3}) {
        ++seed;
        ThreadPool pool(thread_num, {});
        Arrays whole(gradient_dtype, DType::kBFloat16, numel, seed, seed % 4 != 0);
        for (std::size_t i = 0; i < numel; ++i) {
          whole.exp_avg_sq.set(i, std::fabs(whole.exp_avg_sq.get(i)));
          whole.low.set(i, whole.master.get(i));
        }
        Arrays halves = whole;
        std::vector<std::uint16_t> remainders(numel + 1);
        AdamSpan span = halves.span(true);
        span.master = nullptr;
        span.remainder = remainders.data();
        write_masters(span, static_cast<const float*>(whole.master.data()));
        for (long step = 1; step <= 3; ++step) {
          const auto kind = seed % 2 == 0 ? WeightDecayKind::kDecoupled : WeightDecayKind::kL2;
          const AdamScalars scalars = make_adam_scalars(some_hyperparameters(kind), step, 0.37F);
          adam_step(whole.span(true), scalars, pool);
          adam_step(span, scalars, pool);
        }
        std::vector<float> masters(numel);
        read_masters(span, masters.data());
        copy_magnitudes(span.exp_avg_sq, span.exp_avg_sq, nullptr, numel);
        for (std::size_t i = 0; i < numel; ++i) halves.master.set(i, masters[i]);
        expect_equal(halves, whole, std::to_string(numel) + " seed " + std::to_string(seed));
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace zb
