#include "zero/loss_scaler.h"

#include <gtest/gtest.h>

namespace zb {
namespace {

TEST(LossScaler, GrowsAfterSoManyGoodStepsInARow) {
  LossScaler scaler({.enabled = true, .initial_scale = 64.0, .growth_interval_steps = 3});
  for (const double expected : {64.0, 64.0, 128.0, 128.0, 128.0, 256.0}) {
    scaler.step_succeeded();
    EXPECT_EQ(scaler.scale(), expected);
  }
  scaler.step_succeeded();
  scaler.step_succeeded();
  EXPECT_TRUE(scaler.step_overflowed());
  EXPECT_EQ(scaler.state().good_steps, 0);
  for (const double expected : {128.0, 128.0, 256.0}) {  // what was good before the overflow does not count
    scaler.step_succeeded();
    EXPECT_EQ(scaler.scale(), expected);
  }
}

TEST(LossScaler, StaysBetweenItsFloorAndWhatALossInFloatTakes) {
  LossScaler scaler({.enabled = true, .initial_scale = 8388608.0, .growth_interval_steps = 1, .min_scale = 3145728.0});
  for (int step = 0; step < 3; ++step) {
    scaler.step_succeeded();
    EXPECT_EQ(scaler.scale(), 16777216.0);
    EXPECT_EQ(scaler.state().good_steps, 0);
  }
  EXPECT_TRUE(scaler.step_overflowed());
  EXPECT_TRUE(scaler.step_overflowed());
  EXPECT_EQ(scaler.scale(), 4194304.0);
  EXPECT_TRUE(scaler.step_overflowed());
  EXPECT_EQ(scaler.scale(), 3145728.0);
  EXPECT_FALSE(scaler.step_overflowed());
  EXPECT_EQ(scaler.scale(), 3145728.0);
}

}  // namespace
}  // namespace zb
