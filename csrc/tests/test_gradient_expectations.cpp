// When a unit's gradients are all there, as earlier backwards tell: without devices and communicators.
#include "zero/gradient_expectations.h"

#include <gtest/gtest.h>

#include <vector>

namespace zb {
namespace {

// One unit beside the root, of two parameters.
class Expectations : public testing::Test {
 protected:
  Expectations() { expectations_.guess(); }

  // A forward, and a backward that brings these gradients: whether each completed the unit.
  std::vector<bool> train(const std::vector<std::size_t>& arrivals) {
    begin_backward(1);
    std::vector<bool> completed;
    for (const std::size_t parameter : arrivals) completed.push_back(arrive(parameter));
    end_backward();
    return completed;
  }
  void begin_backward(int forward_num) {
    for (int i = 0; i < forward_num; ++i) {
      expectations_.begin_forward();
      expectations_.count_use(1);
    }
    expectations_.begin_backward();
  }
  bool arrive(std::size_t parameter) {
    constexpr int kTask = 1;
    unit().graph_task = kTask;
    expectations_.count_arrival(unit(), parameters_[parameter]);
    return expectations_.is_complete(unit(), parameters_[parameter], kTask);
  }
  void end_backward() {
    expectations_.record();
    expectations_.forget_uses();
  }
  Unit& unit() { return units_[1]; }

  std::vector<Parameter> parameters_;
  std::vector<Unit> units_ = make_units(
      {"root", "a"}, 0, {{.name = "p", .numel = 1, .unit = 1}, {.name = "q", .numel = 1, .unit = 1}}, 1, parameters_);
  GradientExpectations expectations_{units_, parameters_};
};

using Found = std::vector<bool>;

TEST_F(Expectations, TheLastExpectedGradientCompletes) {
  for (int step = 0; step < 3; ++step) EXPECT_EQ(train({0, 1}), Found({false, true})) << step;
}

TEST_F(Expectations, WhatCameInSomeBackwardsOnlyIsNotAwaited) {
  train({0});
  train({1, 0});
  EXPECT_EQ(train({0}), Found({true}));
}

TEST_F(Expectations, WhatMayStillComeBehindTheLastIsAwaited) {
  train({0, 1});
  train({0});
  EXPECT_EQ(train({0, 1}), Found({false, false}));
}

TEST_F(Expectations, AGradientThatNobodyExpectedDoesNotComplete) {
  train({0, 1});
  train({});
  EXPECT_EQ(train({0, 1}), Found({false, false}));
}

TEST_F(Expectations, AUnitThatWasRefutedWaitsForTheEndFromThenOn) {
  train({0, 1});
  expectations_.refute(unit());
  train({0, 1});
  EXPECT_EQ(train({0, 1}), Found({false, false}));
}

TEST_F(Expectations, AUnitIsUnusedOnlyBehindAsManyForwardsAsWereRecorded) {
  train({0, 1});
  for (const int forward_num : {0, 1, 2}) {
    begin_backward(forward_num);
    EXPECT_FALSE(expectations_.is_unused(unit())) << forward_num;
    expectations_.forget_uses();
  }
  expectations_.begin_forward();
  expectations_.begin_backward();
  EXPECT_TRUE(expectations_.is_unused(unit()));
}

}  // namespace
}  // namespace zb
