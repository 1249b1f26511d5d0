#include "optim/adam.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "common/error.h"
#include "test_support.h"

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

// The sequence of docs/decisions/adam.md, once more and apart from the code under test.
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

}  // namespace
}  // namespace zb
