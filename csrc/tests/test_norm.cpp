#include "kernels/norm.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>

namespace zb {
namespace {

constexpr std::size_t kFlatNum = 2;

StepScalars combine(const std::array<double, 2 * kFlatNum>& partial_sums, double divisor, double clip) {
  std::array<double, kFlatNum> flat_sums{};
  StepScalars scalars;
  combine_partial_sums({.partial_sums = partial_sums.data(),
                        .rank_num = 2,
                        .flat_num = kFlatNum,
                        .divisor = divisor,
                        .clip = clip,
                        .flat_sums = flat_sums.data(),
                        .scalars = &scalars});
  return scalars;
}

// As torch.nn.utils.clip_grad_norm_ does: min(1, clip / (norm + 1e-6)), of the averaged gradient.
TEST(Norm, AClippedGradientHasAFactorOfItsOwnAndAnotherIsOnlyAveraged) {
  const std::array<double, 4> sums{100.0, 200.0, 300.0, 424.0};  // a norm of 32, of the averaged gradient 8
  for (const double clip : {1.0, 8.0, 8.0 + 5e-7}) {
    const StepScalars found = combine(sums, 4.0, clip);
    EXPECT_EQ(found.norm, 8.0);
    EXPECT_EQ(found.factor, static_cast<float>(1.0 / 4.0 * (clip / (8.0 + 1e-6)))) << clip;
    EXPECT_LT(found.factor, 0.25F);
    EXPECT_EQ(found.is_skipped, 0U);
  }
  for (const double clip : {0.0, 8.0 + 2e-6, 100.0}) EXPECT_EQ(combine(sums, 4.0, clip).factor, 0.25F) << clip;
}

TEST(Norm, WhatIsNotFiniteOnAnyRankSkipsTheStep) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (std::size_t at = 0; at < 4; ++at) {
      std::array<double, 4> sums{1.0, 2.0, 3.0, 4.0};
      sums[at] = bad;
      EXPECT_EQ(combine(sums, 2.0, 1.0).is_skipped, 1U);
    }
  }
}

}  // namespace
}  // namespace zb
