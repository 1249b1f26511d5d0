// The engine when things go wrong: exceptions in forwards and backwards, gradients that are not finite, ranks that
// disagree, calls at the wrong moment; and explicit gathers.
#include "engine_support.h"

namespace zb {
namespace {

using test::kRoot;
using test::message_of;
using test::Reference;
using test::run_ranks;
using test::same_on_all;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;
using test::try_ranks;
using test::Values;

const std::vector<std::size_t> kUnits{1, 2, 3, 4};
const std::vector<std::size_t> kReversed{4, 3, 2, 1};

class EngineFaults : public test::StageTest {
 protected:
  Values reference_after(long steps) const {
    Reference reference(world_size());
    for (long step = 0; step < steps; ++step) {
      reference.backward(step);
      reference.step();
    }
    return reference.master;
  }
};

INSTANTIATE_TEST_SUITE_P(Engine, EngineFaults, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInLanes, EngineFaults, test::in_lanes(testing::Range(1, 4), 3), test::stage_test_name);

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
  EXPECT_EQ(master, reference_after(4));
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
  EXPECT_EQ(master, reference_after(4));
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
    EXPECT_EQ(master, reference_after(3));
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
    std::string message;
    try {
      toy.train_step();
    } catch (const NonFiniteGradientError& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("step 2"), std::string::npos) << message;
    EXPECT_NE(message.find("load a state"), std::string::npos) << message;
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
    try {
      toy.step();
      ADD_FAILURE() << "no NonFiniteGradientError";
    } catch (const NonFiniteGradientError& error) {
      EXPECT_NE(std::string(error.what()).find("unit 'c'"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("step 2"), std::string::npos) << error.what();
    }
    toy.spoil(SIZE_MAX);
    EXPECT_THROW(toy.step(), StateError);  // those gradients are gone
    toy.train();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EngineFaults, ValuesWrittenInsideAGatherReachEveryRankAndTheMaster) {
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyOptions with = options();
    with.param_dtype = param_dtype;
    const int modifier = world_size() - 1;
    Reference reference(world_size(), param_dtype);
    reference.backward(0);
    reference.step();
    const Values rounded = reference.parameters();
    // What a modifier leaves alone keeps its master's bits.
    for (const std::size_t index : {std::size_t{2}, std::size_t{6}, std::size_t{7}}) {
      for (std::size_t i = 0; i < rounded[index].size(); i += 2) reference.master[index][i] = 0.5F;
    }
    const Values changed = reference.parameters();
    reference.backward(1);
    reference.step();
    const Values master = same_on_all(with, [&](ToyRank& toy) {
      toy.train();
      const std::vector<std::size_t> units{1, 3};
      toy.engine().gather(units);
      for (const std::size_t unit : units) toy.expect_readable(unit);
      if (toy.rank() == modifier) {
        for (const std::size_t index : {std::size_t{2}, std::size_t{6}, std::size_t{7}}) {
          for (std::size_t i = 0; i < toy_parameters()[index].numel; i += 2) toy.tensor(index).set(i, 0.5F);
        }
      }
      EXPECT_THROW(toy.step(), StateError);
      toy.engine().end_gather(units, modifier);
      EXPECT_EQ(toy.tensor(2).data == nullptr, toy.sharded());
      EXPECT_EQ(toy.state(FullState::kParameters), changed);
      toy.train();
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master);
  }
}

TEST_P(EngineFaults, AGatherOnlyReads) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < 2; ++step) {
      toy.engine().gather({kRoot, 1, 2, 3, 4});
      toy.engine().gather({2});
      for (std::size_t unit = 0; unit <= 4; ++unit) toy.expect_readable(unit);
      toy.engine().end_gather({2}, -1);
      toy.expect_readable(2);  // the outer gather still holds it
      toy.engine().end_gather({kRoot, 1, 2, 3, 4}, -1);
      EXPECT_EQ(toy.tensor(0).data == nullptr, toy.sharded());
      toy.train();
    }
    EXPECT_THROW(toy.engine().end_gather({1}, world_size()), ArgumentError);
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference_after(2));
}

TEST_P(EngineFaults, AForwardInsideAGatherUsesWhatIsThere) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    toy.train();
    toy.engine().gather({1, 4});
    toy.forward(kUnits, false);
    toy.expect_readable(1);
    toy.engine().end_gather({1, 4}, -1);
    toy.train();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference_after(2));
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
  EXPECT_EQ(master, reference_after(2));
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

TEST_P(EngineFaults, TheLedgerIsBackToItsLevelAfterEveryStep) {
  run_ranks(options(), [&](ToyRank& toy) {
    toy.train();
    static_cast<void>(toy.state(FullState::kMaster));  // in lanes gradients go when their update was waited for
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
INSTANTIATE_TEST_SUITE_P(EngineInLanes, EngineDisagreement, test::in_lanes(testing::Values(2), 8),
                         test::stage_test_name);

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
    for (int step = 0; step < 2; ++step) {  // in lanes, the second step finds it
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
    });
    for (const std::exception_ptr& error : errors) {
      // In lanes the ranks' different gathers may be what is found first.
      const bool is_found = message_of(error).find("evaluation forward") != std::string::npos ||
                            (is_in_lanes() && message_of(error).find("different collectives") != std::string::npos);
      EXPECT_TRUE(is_found) << message_of(error);
    }
  }
}

}  // namespace
}  // namespace zb
