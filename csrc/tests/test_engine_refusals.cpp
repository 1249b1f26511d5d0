// What a call that is refused, or fails for want of memory, leaves behind.
#include <atomic>

#include "engine_steps.h"
#include "engine_support.h"
#include "rank_threads.h"
#include "reference.h"
#include "sim/sim_late_store.h"

namespace zb {
namespace {

using test::kReversed;
using test::kRoot;
using test::kUnits;
using test::Reference;
using test::same_on_all;
using test::ToyOptions;
using test::ToyRank;
using test::Values;

class EngineRefusals : public test::StageTest {};

INSTANTIATE_TEST_SUITE_P(Engine, EngineRefusals, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineRefusals, test::in_sim(testing::Range(1, 4), 3), test::stage_test_name);

TEST_P(EngineRefusals, AStepWithImpossibleHyperparametersIsAsIfItWasNotCalled) {
  Reference reference(world_size());
  for (long step = 0; step < 2; ++step) {
    reference.backward(step);
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    std::vector<AdamHyperparameters> negative = test::toy_groups();
    negative.back().lr = -1e-3;
    for (long step = 0; step < 2; ++step) {
      toy.forward(kUnits);
      toy.backward(kReversed);
      EXPECT_THROW(toy.engine().step(negative), ArgumentError);
      EXPECT_THROW(toy.engine().step(std::vector(1, test::toy_groups().front())), ArgumentError);
      EXPECT_EQ(toy.engine().steps_applied(), step);
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EngineRefusals, RemaindersNeedStateOnTheDeviceAndKeptShards) {
  ToyOptions with = options();
  with.param_dtype = DType::kBFloat16;
  with.store_param_remainders = true;
  const bool is_sharded = with.stage == ZeroStage::kZero3 && with.world_size > 1;
  for (const bool keeps : {false, true}) {
    with.keep_parameter_shards = keeps;
    for (const std::exception_ptr& error : test::try_ranks(with, [](ToyRank&) {})) {
      EXPECT_EQ(test::message_of(error), is_sharded && !keeps
                                             ? "store_param_remainders needs the shards of parameters to be kept"
                                             : "nothing was thrown");
    }
  }
  with.make_store = make_device_store_with_masters;
  for (const std::exception_ptr& error : test::try_ranks(with, [](ToyRank&) {})) {
    EXPECT_EQ(test::message_of(error), "nothing was thrown");
  }
  with.make_store = test::make_late_store;
  for (const std::exception_ptr& error : test::try_ranks(with, [](ToyRank&) {})) {
    EXPECT_EQ(test::message_of(error), "store_param_remainders needs the optimizer state on the device");
  }
}

TEST_P(EngineRefusals, ABackwardWithUpdatesAndImpossibleHyperparametersIsAsIfItWasNotCalled) {
  Reference reference(world_size());
  reference.backward(0);
  reference.step();
  ToyOptions with = options();
  with.optimizer_in_backward = true;
  const Values master = same_on_all(with, [&](ToyRank& toy) {
    std::vector<AdamHyperparameters> negative = test::toy_groups();
    negative.back().lr = -1e-3;
    toy.forward(kUnits);
    EXPECT_THROW(toy.engine().begin_backward(true, negative), ArgumentError);
    toy.backward(kReversed);
    toy.start_step();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

// The block's end would undo them.
TEST_P(EngineRefusals, ABackwardWithUpdatesInsideAGatherIsAsIfItWasNotCalled) {
  Reference reference(world_size());
  reference.backward(0);
  reference.step();
  ToyOptions with = options();
  with.optimizer_in_backward = true;
  const Values master = same_on_all(with, [&](ToyRank& toy) {
    toy.engine().gather({1, 2});
    toy.forward(kUnits);
    EXPECT_THROW(toy.begin_backward(true), StateError);
    toy.engine().end_gather({1, 2}, 0);
    toy.backward(kReversed);
    toy.start_step();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EngineRefusals, RanksWithDifferentHyperparametersAreTold) {
  if (world_size() == 1) GTEST_SKIP() << "one rank differs from nobody";
  const std::vector<void (*)(AdamHyperparameters&)> changes{
      [](AdamHyperparameters& group) { group.lr *= 2.0; },
      [](AdamHyperparameters& group) { group.beta1 *= 0.5; },
      [](AdamHyperparameters& group) { group.beta2 *= 0.5; },
      [](AdamHyperparameters& group) { group.eps *= 2.0; },
      [](AdamHyperparameters& group) { group.weight_decay += 0.1; },
      [](AdamHyperparameters& group) { group.kind = WeightDecayKind::kL2; },
  };
  for (std::size_t change = 0; change < changes.size(); ++change) {
    const std::vector<std::exception_ptr> errors = test::try_ranks(options(), [&](ToyRank& toy) {
      for (int step = 0; step < 2; ++step) {  // in the simulator a step's reports are read by the next
        toy.forward(kUnits);
        toy.backward(kReversed);
        std::vector<AdamHyperparameters> groups = test::toy_groups();
        if (toy.rank() == world_size() - 1) changes[change](groups.back());
        toy.engine().step(groups);
      }
    });
    for (const std::exception_ptr& error : errors) {
      EXPECT_NE(test::message_of(error).find("different hyperparameters"), std::string::npos)
          << "change " << change << ": " << test::message_of(error);
    }
  }
}

TEST_P(EngineRefusals, AStateIsLoadedBetweenStepsAndStepsGoOnFromThere) {
  run_ranks(options(), [&](ToyRank& toy) {
    const auto load = [&] {
      toy.engine().write_full_state({.steps_applied = 7}, {}, [](FullState, std::size_t parameter, float* values) {
        std::fill_n(values, test::toy_parameters()[parameter].numel, 0.5F);
      });
    };
    toy.forward(kUnits);
    toy.backward(kReversed);
    EXPECT_THROW(load(), StateError);
    EXPECT_TRUE(toy.step().applied);  // of the gradients that were there
    load();
    EXPECT_EQ(toy.engine().steps_applied(), 7);
    EXPECT_FALSE(toy.engine().outcome().applied);
    toy.spoil(2);
    toy.forward(kUnits);
    toy.backward(kReversed);
    const std::string text = test::non_finite_error([&] { toy.step(); });
    EXPECT_NE(text.find("in step 8"), std::string::npos) << text;
    EXPECT_EQ(toy.engine().steps_applied(), 7);
  });
}

TEST_P(EngineRefusals, AModuleMayCallItself) {
  Reference reference(world_size());
  for (long step = 0; step < 3; ++step) {
    reference.backward(step);
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < 3; ++step) {
      toy.engine().begin_forward(true);
      toy.engine().pre_forward(kRoot);
      for (const std::size_t unit : kUnits) {
        toy.engine().pre_forward(unit);
        toy.engine().pre_forward(unit);
        toy.engine().post_forward(unit);
        toy.expect_readable(unit);  // by the outer call, which goes on
        toy.engine().post_forward(unit);
        const bool is_released = toy.tensor(test::parameters_of(unit).front()).data == nullptr;
        EXPECT_EQ(is_released, toy.sharded() && (step == 0 || unit != kUnits.back()));
      }
      toy.engine().post_forward(kRoot);
      toy.engine().end_forward();
      toy.backward(kReversed);
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

// Stage 3 over a communicator whose gathers find the shards in place.
class SplicedGathers : public testing::TestWithParam<bool> {
 protected:
  template <typename Body>
  void in_each_schedule(const Body& body, DType param_dtype = DType::kFloat32) {
    ToyOptions options;
    options.param_dtype = param_dtype;
    options.stage = ZeroStage::kZero3;
    options.world_size = 2;
    options.reshard_after_forward = GetParam();
    for (std::uint32_t number = 0; number < 2 * test::kSimPolicyNum; ++number) {
      met_ = 0;
      if (test::sim_collectives(number) == test::SimCollectives::kPulled) test::run_in_sim(options, number, body);
    }
  }

  void meet(ToyRank& toy) {
    ++met_;
    while (met_ < 2) toy.linger(std::chrono::microseconds(100));
  }

 private:
  std::atomic<int> met_ = 0;
};

INSTANTIATE_TEST_SUITE_P(EngineInSim, SplicedGathers, testing::Bool());

TEST_P(SplicedGathers, WhatIsWrittenWithoutAModifierIsLost) {
  std::atomic<bool> was_spliced = false;
  for (const bool is_between_passes : {false, true}) {
    in_each_schedule([&](ToyRank& toy) {
      toy.train();
      const Values before = toy.state(FullState::kParameters);
      if (is_between_passes) {
        toy.forward(kUnits);
        was_spliced = was_spliced || toy.engine().unit(kUnits.back()).gather_slot.is_spliced();
      }
      toy.engine().gather({4});
      for (std::size_t i = 0; i < before[8].size(); ++i) toy.tensor(8).set(i, 7.0F);
      toy.engine().end_gather({4}, -1);
      if (is_between_passes) {
        // The backward that needs it reads what was there; nothing of it stays.
        toy.engine().begin_backward(true);
        toy.engine().abort_backward();
      }
      EXPECT_EQ(toy.state(FullState::kParameters), before);
    });
  }
  EXPECT_TRUE(was_spliced);
}

TEST_P(SplicedGathers, OneThatFindsNoMemoryLeavesNothingHalfGathered) {
  std::atomic<bool> has_failed = false;
  in_each_schedule([&](ToyRank& toy) {
    for (int step = 0; step < 2; ++step) toy.train();
    toy.engine().outcome();
    meet(toy);
    toy.sim_device().set_full(true);
    try {
      toy.engine().gather({kRoot, 1, 2, 3, 4});
      toy.engine().end_gather({kRoot, 1, 2, 3, 4}, -1);  // where slots are plain, there may be enough
      toy.sim_device().set_full(false);
      return;
    } catch (const std::runtime_error&) {  // this rank's, or the peer's of its own
      has_failed = true;
    }
    toy.sim_device().set_full(false);
    for (std::size_t unit = 0; unit < toy.engine().unit_num(); ++unit) {
      EXPECT_NE(toy.engine().unit(unit).parameter_state, ParameterState::kGathering);
      EXPECT_EQ(toy.engine().unit(unit).pins, 0);
    }
    // Nobody knows whether the peers had memory, and go on.
    EXPECT_THROW(toy.train(), CommunicationError);
  });
  EXPECT_TRUE(has_failed);
}

TEST_P(SplicedGathers, ValuesForWhoseMasterThereIsNoMemoryEndTheEngineOnAllRanks) {
  const auto body = [this](ToyRank& toy) {
    toy.train();
    toy.engine().gather({1});
    meet(toy);
    if (toy.rank() == 0) {
      toy.tensor(2).set(0, 7.0F);
      toy.sim_device().set_full(true);
      EXPECT_THROW(toy.engine().end_gather({1}, 0), OutOfMemoryError);
      toy.sim_device().set_full(false);
    } else {
      try {
        toy.engine().end_gather({1}, 0);
      } catch (const CommunicationError&) {  // that of the peer, where it is known by then
      }
    }
    EXPECT_EQ(toy.engine().unit(1).pins, 0);
    EXPECT_THROW(toy.train(), CommunicationError);
  };
  in_each_schedule(body, DType::kBFloat16);
}

}  // namespace
}  // namespace zb
