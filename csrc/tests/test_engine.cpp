// The engine without torch: every stage and world size ends with the bits of a plain loop.
#include "zero/engine.h"

#include <array>

#include "engine_support.h"
#include "reference.h"

namespace zb {
namespace {

using test::kRoot;
using test::Reference;
using test::run_ranks;
using test::same_on_all;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;
using test::Values;

constexpr long kSteps = 4;
const std::vector<std::size_t> kUnits{1, 2, 3, 4};
const std::vector<std::size_t> kReversed{4, 3, 2, 1};

using EveryStage = test::StageTest;

INSTANTIATE_TEST_SUITE_P(Engine, EveryStage, test::on_cpu(testing::Range(1, 5)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EveryStage, test::in_sim(testing::Range(1, 4), test::kFewSimScheduleNum),
                         test::stage_test_name);

TEST_P(EveryStage, TrainsToTheReferenceInEveryPrecision) {
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType reduce_dtype : {DType::kFloat32, DType::kBFloat16}) {
      ToyOptions with = options();
      with.param_dtype = param_dtype;
      with.reduce_dtype = reduce_dtype;
      Reference reference(world_size(), param_dtype);
      std::vector<double> norms;
      for (long step = 0; step < kSteps; ++step) {
        reference.backward(step);
        norms.push_back(reference.norm());
        reference.step();
      }
      Values parameters, exp_avg, exp_avg_sq;
      const Values master = same_on_all(with, [&](ToyRank& toy) {
        for (const double norm : norms) {
          const StepOutcome outcome = toy.train_step();
          EXPECT_TRUE(outcome.applied);
          EXPECT_NEAR(outcome.grad_norm, norm, 1e-12 * norm);
        }
        const Values found[] = {toy.state(FullState::kParameters), toy.state(FullState::kExpAvg),
                                toy.state(FullState::kExpAvgSq)};
        if (toy.rank() == 0) {
          parameters = found[0];
          exp_avg = found[1];
          exp_avg_sq = found[2];
        }
        EXPECT_EQ(toy.engine().steps_applied(), kSteps);
        return toy.state(FullState::kMaster);
      });
      EXPECT_EQ(master, reference.master);
      EXPECT_EQ(parameters, reference.parameters());
      EXPECT_EQ(exp_avg, test::without_frozen(reference.exp_avg));
      EXPECT_EQ(exp_avg_sq, test::without_frozen(reference.exp_avg_sq));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EveryStage, AccumulatesMicroBatches) {
  constexpr long kAccumulation = 3;
  ToyOptions with = options();
  with.accumulation_steps = kAccumulation;
  Reference reference(world_size());
  for (long step = 0; step < 2; ++step) {
    for (long micro = 0; micro < kAccumulation; ++micro) reference.backward(step * kAccumulation + micro);
    reference.step();
  }
  const Values master = same_on_all(with, [&](ToyRank& toy) {
    for (long step = 0; step < 2; ++step) {
      for (long micro = 1; micro <= kAccumulation; ++micro) {
        toy.forward(kUnits);
        toy.backward(kReversed, micro == kAccumulation);
      }
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EveryStage, FurtherBackwardsBeforeTheStepAdd) {
  // The last rank leaves a unit out, so that the sum so far lies where this rank brought nothing.
  const auto skips = [&](int rank, std::size_t unit) { return rank == world_size() - 1 && unit == 3; };
  Reference reference(world_size());
  for (long step = 0; step < 2; ++step) {
    for (long micro = 0; micro < 3; ++micro) {
      reference.backward(3 * step + micro, [&](int rank, std::size_t unit) { return skips(rank, unit) ? 0.0F : 1.0F; });
    }
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    std::vector<std::size_t> units;
    for (const std::size_t unit : kUnits) {
      if (!skips(toy.rank(), unit)) units.push_back(unit);
    }
    for (const std::array<bool, 3>& backwards : {std::array{false, true, true}, {true, false, true}}) {
      for (const bool last : backwards) {
        toy.forward(units);
        toy.backward({units.rbegin(), units.rend()}, last);
      }
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EveryStage, ClipsByTheGlobalNorm) {
  constexpr double kClip = 0.5;
  ToyOptions with = options();
  with.clip = kClip;
  Reference reference(world_size());
  for (long step = 0; step < kSteps; ++step) {
    reference.backward(step);
    ASSERT_GT(reference.norm(), kClip);
    reference.step(kClip);
  }
  for (const bool mixes : {false, true}) {
    with.mixes_reduce_dtypes = mixes;
    const Values master = same_on_all(with, [&](ToyRank& toy) {
      for (long step = 0; step < kSteps; ++step) toy.train();
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master) << (mixes ? "gradients of two dtypes" : "gradients of one dtype");
  }
}

TEST_P(EveryStage, UnitsMayBeSkippedOnOneRankOrOnAll) {
  // By step: what the last rank leaves out, what all leave out.
  const std::vector<std::pair<std::size_t, std::size_t>> skipped{{2, 0}, {0, 0}, {3, 0}, {0, 4}, {1, 2}, {0, 0}};
  const int last_rank = world_size() - 1;
  const auto is_skipped = [&](std::size_t step, int rank, std::size_t unit) {
    return unit != kRoot && (unit == skipped[step].second || (rank == last_rank && unit == skipped[step].first));
  };
  Reference reference(world_size());
  for (std::size_t step = 0; step < skipped.size(); ++step) {
    reference.backward(static_cast<long>(step),
                       [&](int rank, std::size_t unit) { return is_skipped(step, rank, unit) ? 0.0F : 1.0F; });
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (std::size_t step = 0; step < skipped.size(); ++step) {
      std::vector<std::size_t> units;
      for (const std::size_t unit : kUnits) {
        if (!is_skipped(step, toy.rank(), unit)) units.push_back(unit);
      }
      toy.train(units);
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EveryStage, OrdersMayChangeAndDifferBetweenRanks) {
  const std::vector<std::vector<std::size_t>> orders{
      {1, 2, 3, 4}, {1, 2, 3, 4}, {4, 2, 1, 3}, {3, 4, 2, 1}, {2, 1, 4, 3}};
  Reference reference(world_size());
  for (std::size_t step = 0; step < 6; ++step) {
    reference.backward(static_cast<long>(step));
    reference.step();
  }
  for (const bool differ : {false, true}) {
    const Values master = same_on_all(options(), [&](ToyRank& toy) {
      for (std::size_t step = 0; step < 6; ++step) {
        const std::size_t shift = differ ? static_cast<std::size_t>(toy.rank()) : 0;
        toy.train(orders[(step + shift) % orders.size()]);
      }
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master) << (differ ? "orders differ" : "orders change");
  }
}

// In the last step of three, when all ranks count on the order of the first two.
TEST_P(EveryStage, GradientsMayComeLastOrNotAtAllOnOneRank) {
  constexpr std::size_t kLate = 4;
  for (const bool comes : {true, false}) {
    Reference reference(world_size());
    for (long step = 0; step < 3; ++step) {
      reference.backward(step, [&](int rank, std::size_t unit) {
        return comes || step < 2 || rank != 0 || unit != kLate ? 1.0F : 0.0F;
      });
      reference.step();
    }
    const Values master = same_on_all(options(), [&](ToyRank& toy) {
      for (int step = 0; step < 2; ++step) toy.train();
      toy.forward(kUnits);
      toy.engine().begin_backward(true);
      for (const std::size_t unit : kReversed) {
        if (toy.rank() != 0 || unit != kLate) {
          toy.unit_backward(unit);
        } else {
          toy.engine().pre_backward(unit);
        }
      }
      for (const std::size_t parameter : test::parameters_of(kRoot)) toy.give_gradient(parameter);
      if (toy.rank() == 0 && comes) toy.unit_backward(kLate);
      toy.engine().end_backward();
      toy.start_step();
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master);
  }
}

TEST_P(EveryStage, RanksMayBeEarlyOrLate) {
  Reference reference(world_size());
  for (long step = 0; step < kSteps; ++step) {
    reference.backward(step);
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    const auto linger = [&](std::size_t at) {
      if ((at + static_cast<std::size_t>(toy.rank())) % 3 == 0) toy.linger(std::chrono::milliseconds(3));
    };
    for (long step = 0; step < kSteps; ++step) {
      linger(0);
      toy.forward(kUnits);
      toy.engine().begin_backward(true);
      for (const std::size_t unit : kReversed) {
        linger(unit + static_cast<std::size_t>(step));
        // The ranks' gradients come in different orders within the backward, the root's among them.
        if (unit == 1 + static_cast<std::size_t>(toy.rank()) % 4) {
          for (const std::size_t parameter : test::parameters_of(kRoot)) toy.give_gradient(parameter);
        }
        toy.unit_backward(unit);
      }
      toy.engine().end_backward();
      toy.set_micro_step(toy.micro_step() + 1);
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EveryStage, AUnitMayBeUsedTwice) {
  Reference reference(world_size());
  for (long step = 0; step < kSteps; ++step) {
    const bool twice = step != 1;
    reference.backward(step, [&](int, std::size_t unit) { return twice && unit == 2 ? 2.0F : 1.0F; });
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < kSteps; ++step) {
      if (step != 1) {
        toy.train({1, 2, 3, 2, 4});
      } else {
        toy.train();
      }
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EveryStage, EvaluationsInBetweenChangeNothing) {
  Reference reference(world_size());
  for (long step = 0; step < kSteps; ++step) {
    reference.backward(step);
    reference.step();
  }
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < kSteps; ++step) {
      toy.forward(kUnits, false);
      toy.train();
      toy.forward({4, 1}, false);
    }
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, reference.master);
}

TEST_P(EveryStage, ParametersAreThereOnlyWhileTheirUnitWorks) {
  run_ranks(options(), [&](ToyRank& toy) {
    for (long step = 0; step < 3; ++step) {
      toy.train();
      for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
        ASSERT_EQ(toy.tensor(index).data == nullptr, toy.sharded());
        if (toy.sharded()) {
          EXPECT_NE(toy.tensor(index).message.find("'" + toy_parameters()[index].name + "'"), std::string::npos);
        }
      }
    }
    const Values before = toy.state(FullState::kParameters);
    toy.close();
    for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
      if (toy.sharded()) {
        EXPECT_EQ(toy.tensor(index).data, nullptr);
        continue;
      }
      // Replicated parameters outlive the engine.
      for (std::size_t i = 0; i < before[index].size(); ++i) ASSERT_EQ(toy.tensor(index).get(i), before[index][i]);
    }
  });
}

TEST_P(EveryStage, PrefetchingChangesSpeedOnly) {
  Reference reference(world_size());
  for (long step = 0; step < kSteps; ++step) {
    reference.backward(step);
    reference.step();
  }
  for (const std::size_t prefetch_bytes : {std::size_t{0}, std::size_t{1} << 20}) {
    ToyOptions with = options();
    with.prefetch_bytes = prefetch_bytes;
    const Values master = same_on_all(with, [&](ToyRank& toy) {
      for (long step = 0; step < kSteps; ++step) toy.train();
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master);
  }
}

TEST_P(EveryStage, StateMayBeReadByOneRank) {
  Reference reference(world_size());
  reference.backward(0);
  reference.step();
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    toy.train();
    if (toy.rank() != world_size() - 1) {
      for (const FullState kind : {FullState::kMaster, FullState::kExpAvg}) toy.engine().read_full_state(kind, nullptr);
      return reference.master;
    }
    Values found = toy.state(FullState::kMaster);
    EXPECT_EQ(toy.state(FullState::kExpAvg), test::without_frozen(reference.exp_avg));
    return found;
  });
  EXPECT_EQ(master, reference.master);
}

}  // namespace
}  // namespace zb
