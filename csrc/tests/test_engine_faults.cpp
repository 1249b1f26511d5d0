// The engine when things go wrong on a rank: exceptions in forwards and backwards, memory that runs out, gradients that
// are not finite, calls at the wrong moment.
#include <algorithm>
#include <atomic>
#include <cerrno>

#include "common/scope_exit.h"
#include "engine_steps.h"
#include "engine_support.h"
#include "rank_threads.h"
#include "reference.h"

namespace zb {
namespace {

using test::kReversed;
using test::kUnits;
using test::message_of;
using test::Reference;
using test::run_ranks;
using test::same_on_all;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;
using test::try_ranks;
using test::Values;

class EngineFaults : public test::StageTest {};

INSTANTIATE_TEST_SUITE_P(Engine, EngineFaults, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineFaults, test::in_sim(testing::Range(1, 4), 3), test::stage_test_name);

TEST_P(EngineFaults, AFailedForwardLeavesNoTrace) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < 4; ++step) {
      // The exception comes at another place on every rank, in the first step before anything is recorded.
      std::vector<std::size_t> reached(kUnits.begin(), kUnits.begin() + (toy.rank() + step) % 4);
      toy.failing_forward(reached);
      toy.train();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, test::reference_master(world_size(), 4));
}

TEST_P(EngineFaults, AFailedBackwardIsRepeated) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < 4; ++step) {
      if (step != 2) {
        toy.forward(kUnits);
        toy.engine().begin_backward(true);
        for (int i = 0; i < (toy.rank() + static_cast<int>(step)) % 4; ++i) {
          toy.unit_backward(kReversed[static_cast<std::size_t>(i)]);
        }
        toy.engine().abort_backward();
        EXPECT_THROW(toy.step(), StateError);
      }
      toy.train();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, test::reference_master(world_size(), 4));
}

TEST_P(EngineFaults, AFailedBackwardDropsTheWholeWindow) {
  ToyOptions with = options();
  with.accumulation_steps = 2;
  Reference reference(world_size());
  reference.backward(1);
  reference.backward(2);
  reference.step();
  const Values master = same_on_all(with, [&](ToyRank& toy) {
    toy.forward(kUnits);
    toy.backward(kReversed, false);
    toy.forward(kUnits);
    toy.engine().begin_backward(true);
    toy.unit_backward(4);
    toy.engine().abort_backward();
    EXPECT_THROW(toy.step(), StateError);
    for (const bool last : {false, true}) {
      toy.forward(kUnits);
      toy.backward(kReversed, last);
    }
    toy.step();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

// Of this rank's allocations of gradient shards, how many are still to succeed; none fails below 0.
thread_local long allocations_left = -1;

void allocate_or_fail() {
  if (allocations_left >= 0 && allocations_left-- == 0) throw OutOfMemoryError("no memory for reduced gradients");
}

void backward_or_abort(ToyRank& toy) {
  try {
    toy.backward(kReversed);
  } catch (const OutOfMemoryError&) {
    allocations_left = -1;
    toy.engine().abort_backward();
    throw;
  }
}

TEST_P(EngineFaults, GradientsWithoutMemoryAreAnErrorAndTheStepIsRepeated) {
  ToyOptions with = options();
  with.before_allocation = allocate_or_fail;
  for (const long succeeding : {0L, 2L, 4L}) {
    const Values master = same_on_all(with, [&](ToyRank& toy) {
      for (long step = 0; step < 3; ++step) {
        toy.forward(kUnits);
        if (toy.engine().policy().gradients == GradientPlacement::kShardedEachMicroBatch) {
          allocations_left = (succeeding + step) % 5;
          EXPECT_THROW(backward_or_abort(toy), OutOfMemoryError);
          toy.forward(kUnits);
        }
        toy.backward(kReversed);
        toy.start_step();
      }
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, test::reference_master(world_size(), 3));
  }
}

TEST_P(EngineFaults, AnErrorBehindUpdatesInBackwardTearsTheEngine) {
  ToyOptions with = options();
  with.optimizer_in_backward = true;
  run_ranks(with, [&](ToyRank& toy) {
    toy.train_step();
    // Nothing was reduced yet.
    toy.forward(kUnits);
    toy.begin_backward(true);
    toy.engine().abort_backward();
    toy.train_step();
    toy.forward(kUnits);
    toy.backward(kReversed);
    EXPECT_THROW(toy.engine().begin_forward(false), StateError);
    EXPECT_THROW(toy.engine().gather({1}), StateError);
    EXPECT_THROW(toy.state(FullState::kMaster), StateError);
    toy.step();
    EXPECT_EQ(toy.engine().steps_applied(), 3);
    toy.forward(kUnits);
    toy.begin_backward(true);
    for (const std::size_t unit : kReversed) toy.unit_backward(unit);
    toy.engine().abort_backward();
    EXPECT_THROW(toy.engine().begin_forward(true), StateError);
    EXPECT_THROW(toy.engine().outcome(), StateError);
  });
}

TEST_P(EngineFaults, AGradientThatIsNotFiniteBehindUpdatesTearsTheEngine) {
  ToyOptions with = options();
  with.optimizer_in_backward = true;
  run_ranks(with, [&](ToyRank& toy) {
    toy.train_step();
    if (toy.rank() == 0) toy.spoil(2);
    const std::string text = test::non_finite_error([&] { toy.train_step(); });
    EXPECT_NE(text.find("step 2"), std::string::npos) << text;
    EXPECT_NE(text.find("load a state"), std::string::npos) << text;
    EXPECT_THROW(toy.engine().begin_forward(true), StateError);
  });
}

TEST_P(EngineFaults, OneRankWithoutMemoryEndsAll) {
  if (stage_policy(options().stage, world_size()).gradients != GradientPlacement::kShardedEachMicroBatch) {
    GTEST_SKIP() << "gradients are there for good";
  }
  ToyOptions with = options();
  with.before_allocation = allocate_or_fail;
  const auto errors = try_ranks(with, [&](ToyRank& toy) {
    toy.train();
    toy.forward(kUnits);
    if (toy.rank() == 0) allocations_left = 2;
    backward_or_abort(toy);
    toy.step();
    toy.train_step();
  });
  for (std::size_t index = 0; index < errors.size(); ++index) {
    ASSERT_NE(errors[index], nullptr);
    if (index % static_cast<std::size_t>(world_size()) == 0) {
      EXPECT_THROW(std::rethrow_exception(errors[index]), OutOfMemoryError);
    } else {
      EXPECT_THROW(std::rethrow_exception(errors[index]), CommunicationError);
      EXPECT_NE(message_of(errors[index]).find("rank 0"), std::string::npos) << message_of(errors[index]);
    }
  }
}

TEST_P(EngineFaults, AnOverflowSkipsTheStepEverywhereAndHalvesTheScale) {
  ToyOptions with = options();
  with.param_dtype = DType::kFloat16;
  with.reduce_dtype = DType::kFloat16;
  with.loss_scale = {.enabled = true, .initial_scale = 64.0, .growth_interval_steps = 2};
  Reference reference(world_size(), DType::kFloat16);
  for (const long micro_step : {0, 2, 3}) {
    reference.backward(micro_step);
    reference.step();
  }
  for (std::size_t spoiled = 0; spoiled < toy_parameters().size(); spoiled += 3) {
    const Values master = same_on_all(with, [&](ToyRank& toy) {
      EXPECT_TRUE(toy.train_step().applied);
      const Values before = toy.state(FullState::kMaster);
      if (toy.rank() == world_size() - 1) toy.spoil(spoiled);
      const StepOutcome outcome = toy.train_step();
      EXPECT_FALSE(outcome.applied);
      EXPECT_FALSE(std::isfinite(outcome.grad_norm));
      EXPECT_EQ(toy.engine().loss_scale(), 32.0);
      EXPECT_EQ(toy.state(FullState::kMaster), before);
      toy.spoil(SIZE_MAX);
      EXPECT_TRUE(toy.train_step().applied);
      EXPECT_TRUE(toy.train_step().applied);
      EXPECT_EQ(toy.engine().loss_scale(), 64.0);
      EXPECT_EQ(toy.engine().steps_applied(), 3);
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master);
  }
}

TEST_P(EngineFaults, AnOverflowWithTheScaleAtItsFloorRaisesAndChangesNothing) {
  ToyOptions with = options();
  with.param_dtype = DType::kFloat16;
  with.reduce_dtype = DType::kFloat16;
  with.loss_scale = {.enabled = true, .initial_scale = 64.0, .min_scale = 32.0};
  Reference reference(world_size(), DType::kFloat16);
  for (const long micro_step : {0, 3}) {
    reference.backward(micro_step);
    reference.step();
  }
  const Values master = same_on_all(with, [&](ToyRank& toy) {
    EXPECT_TRUE(toy.train_step().applied);
    const Values before = toy.state(FullState::kMaster);
    if (toy.rank() == 0) toy.spoil(test::parameters_of(3).front());
    EXPECT_FALSE(toy.train_step().applied);
    EXPECT_EQ(toy.engine().loss_scale(), 32.0);
    const std::string text = test::non_finite_error([&] { toy.train_step(); });
    EXPECT_NE(text.find("unit 'c'"), std::string::npos) << text;
    EXPECT_NE(text.find("at its floor"), std::string::npos) << text;
    EXPECT_EQ(toy.engine().loss_scale(), 32.0);
    EXPECT_EQ(toy.state(FullState::kMaster), before);
    toy.spoil(SIZE_MAX);
    EXPECT_TRUE(toy.train_step().applied);
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EngineFaults, AScaleThatStaysSkipsWithoutAnError) {
  ToyOptions with = options();
  with.param_dtype = DType::kFloat16;
  with.reduce_dtype = DType::kFloat16;
  with.loss_scale = {.enabled = true, .dynamic = false, .initial_scale = 64.0, .min_scale = 64.0};
  same_on_all(with, [&](ToyRank& toy) {
    toy.spoil(test::parameters_of(3).front());
    for (int step = 0; step < 3; ++step) EXPECT_FALSE(toy.train_step().applied);
    EXPECT_EQ(toy.engine().loss_scale(), 64.0);
    return toy.state(FullState::kMaster);
  });
}

TEST_P(EngineFaults, AGradientThatIsNotFiniteRaisesEverywhereAndChangesNothing) {
  Reference reference(world_size());
  for (const long micro_step : {0, 2}) {
    reference.backward(micro_step);
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    toy.train();
    if (toy.rank() == 0) toy.spoil(test::parameters_of(3).front());
    toy.forward(kUnits);
    toy.backward(kReversed);
    const std::string text = test::non_finite_error([&] { toy.step(); });
    EXPECT_NE(text.find("unit 'c'"), std::string::npos) << text;
    EXPECT_NE(text.find("step 2"), std::string::npos) << text;
    toy.spoil(SIZE_MAX);
    EXPECT_THROW(toy.step(), StateError);  // those gradients are gone
    toy.train();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EngineFaults, CallsAtTheWrongMomentAreRefused) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    Engine& engine = toy.engine();
    EXPECT_THROW(toy.step(), StateError);
    EXPECT_THROW(toy.give_gradient(0), StateError);
    EXPECT_THROW(engine.pre_backward(1), StateError);
    if (toy.sharded()) {
      EXPECT_THROW(engine.pre_forward(1), StateError);
    }
    toy.train();
    engine.begin_forward(true);
    EXPECT_THROW(engine.begin_forward(true), StateError);
    EXPECT_THROW(toy.step(), StateError);
    if (toy.sharded()) {
      EXPECT_THROW(engine.gather({1}), StateError);
    }
    engine.abandon_forward();
    engine.abandon_forward();  // outside a forward it does nothing
    engine.abort_backward();   // outside a backward too
    toy.forward(kUnits);
    engine.begin_backward(true);
    EXPECT_THROW(toy.step(), StateError);
    EXPECT_THROW(engine.begin_forward(true), StateError);
    engine.abort_backward();
    toy.train();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, test::reference_master(world_size(), 2));
}

TEST_P(EngineFaults, AReplacedStorageIsFoundAndNamed) {
  const std::vector<std::exception_ptr> errors = try_ranks(options(), [&](ToyRank& toy) {
    toy.train();
    toy.tensor(4).intact = false;
    toy.train();
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_NE(message_of(error).find("'b.weight'"), std::string::npos) << message_of(error);
  }
}

// The error comes in front of what peers wait for and behind it, with units in the order recorded and in another.
TEST_P(EngineFaults, AReplacedStorageOfOneRankLeavesNobodyWaiting) {
  if (stage_policy(options().stage, world_size()).parameters != Placement::kSharded)
    GTEST_SKIP() << "ranks do not meet in forwards";
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (int step = 0; step < 2; ++step) {
      const bool replaces = toy.rank() == 0;
      toy.tensor(4).intact = !replaces;  // of unit 2
      if (replaces) {
        EXPECT_THROW(toy.forward({2, 1, 3, 4}), StateError);
        toy.engine().abandon_forward();
        toy.forward({1, 3, 4});
      } else {
        toy.failing_forward(kUnits);
        toy.forward(kUnits);
      }
      toy.tensor(4).intact = true;
      toy.backward(kReversed);
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, test::reference_master(world_size(), 2));
}

TEST_P(EngineFaults, AStoreThatOneRankCannotMakeEndsAll) {
  std::atomic<int> num{0};
  ToyOptions with = options();
  with.make_store = [&](Ledger* ledger, const DeviceParts& parts) {
    if (num++ % world_size() == 0) throw IoError(ENOENT, "no such folder of swap files");
    return make_device_store(ledger, parts);
  };
  for (const std::exception_ptr& error : try_ranks(with, [](ToyRank&) {})) {
    EXPECT_NE(message_of(error).find("no such folder"), std::string::npos) << message_of(error);
  }
}

TEST_P(EngineFaults, WhatARankLacksMemoryForAloneEndsAllAtOnce) {
  const std::vector<std::size_t> all{0, 1, 2, 3, 4};
  const auto broadcast = [](ToyRank& toy) {
    std::vector<std::byte> bytes(1 << 10);
    toy.engine().broadcast(bytes.data(), bytes.size());
  };
  const auto end_of_forward = [](ToyRank& toy) {  // what is pinned is received beside it
    toy.engine().begin_forward(true);
    toy.engine().end_forward();
  };
  const auto end_of_backward = [](ToyRank& toy) {
    toy.engine().begin_backward(true);
    toy.engine().end_backward();
  };
  for (std::uint32_t number = 0; number < options().sim_schedule_num; ++number) {
    if (world_size() == 1 || test::sim_collectives(number) != test::SimCollectives::kMet) continue;
    std::vector<std::function<void(ToyRank&)>> calls{broadcast};
    if (options().stage == ZeroStage::kZero3) calls.insert(calls.end(), {end_of_forward, end_of_backward});
    for (const auto& call : calls) {
      std::atomic<int> num{0};
      test::run_in_sim(options(), number, [&](ToyRank& toy) {
        const ScopeExit through([&] { ++num; });
        const bool lacks = toy.rank() == 0;
        std::string message;
        try {
          toy.train();
          toy.engine().gather(all);
          toy.sim_device().set_full(lacks);
          for (int round = 0; round < 3; ++round) call(toy);
        } catch (const OutOfMemoryError&) {
          EXPECT_TRUE(lacks);
          toy.sim_device().set_full(false);
          while (num < world_size() - 1) toy.linger(std::chrono::microseconds(100));
          message = test::communication_error([&] { call(toy); });
        } catch (const CommunicationError& error) {
          message = error.what();
          EXPECT_FALSE(lacks);
        }
        EXPECT_NE(message.find("rank 0 aborted: no memory is left"), std::string::npos) << message;
      });
    }
  }
}

TEST(LoneEngine, LoadsAStateForWhichItLackedMemoryBefore) {
  const auto read = [](FullState, std::size_t parameter, float* values) {
    std::fill_n(values, toy_parameters()[parameter].numel, 0.5F);
  };
  ToyOptions options;
  options.stage = ZeroStage::kZero3;
  test::run_in_sim(options, 0, [&](ToyRank& toy) {
    toy.sim_device().set_full(true);
    EXPECT_THROW(toy.engine().write_full_state({}, {}, read), OutOfMemoryError);
    EXPECT_THROW(toy.engine().begin_forward(true), StateError);
    toy.sim_device().set_full(false);
    toy.engine().write_full_state({}, {}, read);
    toy.train();
  });
}

TEST_P(EngineFaults, TheLedgerIsBackToItsLevelAfterEveryStep) {
  run_ranks(options(), [&](ToyRank& toy) {
    toy.train();
    static_cast<void>(toy.state(FullState::kMaster));  // in the simulator gradients go when their update was waited for
    const std::int64_t level = toy.engine().ledger().total(Tier::kDevice).current_bytes;
    for (long step = 0; step < 2; ++step) {
      toy.failing_forward({1, 2});
      toy.train({2, 1, 4});
      toy.engine().gather({1, 2, 3, 4});
      toy.engine().end_gather({1, 2, 3, 4}, 0);
      static_cast<void>(toy.state(FullState::kMaster));
      EXPECT_EQ(toy.engine().ledger().total(Tier::kDevice).current_bytes, level);
    }
  });
}

}  // namespace
}  // namespace zb
