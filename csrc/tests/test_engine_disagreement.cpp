// Ranks that end, or do something else than the others.
#include <cmath>

#include "engine_steps.h"
#include "engine_support.h"

namespace zb {
namespace {

using test::kReversed;
using test::kUnits;
using test::message_of;
using test::run_ranks;
using test::ToyOptions;
using test::ToyRank;
using test::try_ranks;

class EngineDisagreement : public test::StageTest {
 protected:
  ToyOptions options() const {
    ToyOptions result = StageTest::options();
    result.timeout = std::chrono::seconds(20);
    return result;
  }
  int stage() const { return std::get<0>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Engine, EngineDisagreement, test::on_cpu(testing::Values(2)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineDisagreement, test::in_sim(testing::Values(2), 8), test::stage_test_name);

TEST_P(EngineDisagreement, ARankThatThrowsEndsTheOthersToo) {
  const std::vector<std::exception_ptr> errors = try_ranks(options(), [](ToyRank& toy) {
    toy.train();
    if (toy.rank() == 1) throw StateError("rank 1 is out of data");
    toy.train();
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_NE(message_of(error).find("rank 1 is out of data"), std::string::npos) << message_of(error);
  }
}

TEST_P(EngineDisagreement, WhatAnAbortedCollectiveLeavesIsNotRead) {
  const std::vector<std::exception_ptr> errors = try_ranks(options(), [](ToyRank& toy) {
    toy.train_step();
    if (toy.rank() == 1) throw StateError("rank 1 is out of data");
    const auto visit = [](std::size_t, const float* values) { EXPECT_TRUE(std::isfinite(values[0])); };
    for (int round = 0; round < 2; ++round) toy.engine().read_full_state(FullState::kExpAvg, visit);
    toy.train_step();
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_NE(message_of(error).find("rank 1 is out of data"), std::string::npos) << message_of(error);
  }
}

// A gather that ends without an error had values, and leaves them.
TEST_P(EngineDisagreement, WhatAnAbortedCollectiveLeavesIsAnErrorOfTheGather) {
  const std::vector<std::size_t> units{1, 2};
  for (const bool writes : {false, true}) {
    const std::vector<std::exception_ptr> errors = try_ranks(options(), [&](ToyRank& toy) {
      toy.train();
      if (writes) toy.engine().gather(units);
      if (toy.rank() == 1) throw StateError("rank 1 is out of data");
      if (!writes) toy.engine().gather(units);
      const float found = toy.tensor(2).get(0);
      toy.engine().end_gather(units, writes ? 1 : -1);
      EXPECT_TRUE(std::isfinite(found));
      EXPECT_TRUE(toy.tensor(2).data == nullptr || std::isfinite(toy.tensor(2).get(0)));
      toy.train_step();
    });
    for (const std::exception_ptr& error : errors) {
      EXPECT_NE(message_of(error).find("rank 1 is out of data"), std::string::npos) << message_of(error);
    }
  }
}

TEST_P(EngineDisagreement, AnEngineMayBeClosedInTheMiddleOfABackward) {
  run_ranks(options(), [](ToyRank& toy) {
    toy.train();
    toy.forward(kUnits);
    toy.engine().begin_backward(true);
    toy.unit_backward(1);  // not its turn: its gradients wait
    toy.engine().pre_backward(2);
    toy.close();
  });
}

TEST_P(EngineDisagreement, DifferentNumbersOfMicroBatchesAreFound) {
  if (stage() > 1) GTEST_SKIP() << "stages 2 and 3 communicate in every micro-batch and fail there";
  ToyOptions with = options();
  with.accumulation_steps = 2;
  const std::vector<std::exception_ptr> errors = try_ranks(with, [](ToyRank& toy) {
    for (int step = 0; step < 2; ++step) {  // in the simulator, the second step finds it
      for (int micro = toy.rank(); micro < 2; ++micro) {
        toy.forward(kUnits);
        toy.backward(kReversed, micro == 1);
      }
      toy.start_step();
    }
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_NE(message_of(error).find("of 1 "), std::string::npos) << message_of(error);
    EXPECT_NE(message_of(error).find("of 2 "), std::string::npos) << message_of(error);
  }
}

TEST_P(EngineDisagreement, ADifferentKindOfPassIsFound) {
  if (stage() < 3) GTEST_SKIP() << "forwards communicate in stage 3 only";
  for (const bool recorded : {false, true}) {
    const std::vector<std::exception_ptr> errors = try_ranks(options(), [&](ToyRank& toy) {
      if (recorded) toy.train();
      toy.forward(kUnits, toy.rank() == 0);
      if (toy.rank() == 0)
        toy.backward(kReversed);  // in the simulator, a forward of training does not wait for its peers
    });
    for (const std::exception_ptr& error : errors) {
      // In the simulator the ranks' different gathers may be what is found first.
      const bool is_found = message_of(error).find("evaluation forward") != std::string::npos ||
                            (is_in_sim() && message_of(error).find("different collectives") != std::string::npos);
      EXPECT_TRUE(is_found) << message_of(error);
    }
  }
}

}  // namespace
}  // namespace zb
