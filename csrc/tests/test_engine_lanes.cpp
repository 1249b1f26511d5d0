// The engine on devices whose lanes run late, against the engine on the CPU: the same bits are read by every forward
// and backward and end in every state, however the lanes are starved and whatever the ranks' walks are.
#include <algorithm>
#include <array>
#include <map>
#include <string>

#include "engine_steps.h"
#include "engine_support.h"
#include "reference.h"
#include "sim/sim_late_store.h"

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

using test::kReversed;
using test::kUnits;
using test::walk;

using EngineLanes = test::StageTest;

INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineLanes, test::in_sim(testing::Range(1, 4), test::kSimScheduleNum),
                         test::stage_test_name);

TEST_P(EngineLanes, EndAsTheCpuDoes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const long accumulation_steps : {1L, 3L}) {
      ToyOptions with = options();
      with.param_dtype = dtype;
      with.reduce_dtype = dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
      if (dtype == DType::kFloat16) with.accumulate_dtype = DType::kFloat32;
      with.accumulation_steps = accumulation_steps;
      with.clip = accumulation_steps == 1 ? 0.5 : 0.0;
      with.loss_scale = {.enabled = dtype == DType::kFloat16, .initial_scale = 64.0};
      with.reshard_after_forward = dtype != DType::kFloat32;
      with.keep_parameter_shards = dtype == DType::kFloat16;
      with.keep_root_bytes = dtype == DType::kBFloat16 ? 0 : SIZE_MAX;
      with.publish_bytes = accumulation_steps == 1 ? 0 : 2048;
      with.prefetch_bytes = dtype == DType::kFloat16 ? 0 : dtype == DType::kBFloat16 ? 1U << 20U : SIZE_MAX;
      same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); });
      if (HasFailure()) return;
    }
  }
}

// All of a walk, bits and what is read meanwhile, is the same where masters are kept as remainders.
TEST_P(EngineLanes, RemaindersEndAsWholeMastersDo) {
  for (const bool in_backward : {false, true}) {
    ToyOptions with = options();
    with.param_dtype = DType::kBFloat16;
    with.reduce_dtype = in_backward ? DType::kBFloat16 : DType::kFloat32;
    with.accumulation_steps = in_backward ? 2 : 1;
    with.optimizer_in_backward = in_backward;
    with.clip = in_backward ? 0.0 : 0.5;
    with.keep_parameter_shards = true;
    ToyOptions plain = with;
    plain.sim_schedule_num = 0;
    const Values expected = same_on_all(plain, [&](ToyRank& toy) { return walk(toy, with); });
    with.store_param_remainders = true;
    EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected);
    if (HasFailure()) return;
  }
}

// Whose gathers read shards that the step is about to change.
TEST_P(EngineLanes, AnEvaluationMayComeBetweenBackwardAndStep) {
  ToyOptions with = options();
  same_on_all(with, [&](ToyRank& toy) {
    for (int step = 0; step < 4; ++step) {
      toy.forward(kUnits);
      toy.backward(kReversed);
      toy.forward(kUnits, false);
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
}

// Gradients that are pushed and those that are added up first use the same memory in different ways; what one leaves
// between parameters must not get into the other's norm.
TEST_P(EngineLanes, WindowsOfOneAndOfTwoBackwardsTakeTurns) {
  ToyOptions with = options();
  with.clip = 0.5;
  same_on_all(with, [&](ToyRank& toy) {
    Values norms(1);
    for (int step = 0; step < 6; ++step) {
      for (int backward = 0; backward <= step % 2; ++backward) {
        toy.forward(kUnits);
        toy.backward(kReversed);
      }
      norms[0].push_back(static_cast<float>(toy.step().grad_norm));
    }
    return norms;
  });
}

// Updates that are issued only when somebody waits for them change nothing.
TEST_P(EngineLanes, ALateStoreEndsAsTheDeviceStoreDoes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    ToyOptions with = options();
    with.param_dtype = with.reduce_dtype = dtype;
    with.accumulation_steps = dtype == DType::kFloat32 ? 2 : 1;
    with.clip = dtype == DType::kBFloat16 ? 0.5 : 0.0;
    with.loss_scale = {.enabled = dtype == DType::kFloat16, .initial_scale = 64.0};
    ToyOptions on_cpu = with;
    on_cpu.sim_schedule_num = 0;
    const Values expected = same_on_all(on_cpu, [&](ToyRank& toy) { return walk(toy, with); });
    with.make_store = test::make_late_store;
    EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected);
    if (HasFailure()) return;
  }
}

// Updates that begin in backward end where those of the step end, on walks that differ by rank too.
TEST_P(EngineLanes, UpdatesInBackwardEndAsThoseOfTheStepDo) {
  for (const bool late : {false, true}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      ToyOptions with = options();
      with.param_dtype = with.reduce_dtype = dtype;
      with.accumulation_steps = late ? 2 : 1;
      with.publish_bytes = 2048;
      ToyOptions plain = with;
      plain.sim_schedule_num = 0;
      const Values expected = same_on_all(plain, [&](ToyRank& toy) { return walk(toy, with); });
      with.optimizer_in_backward = true;
      if (late) with.make_store = test::make_late_store;
      EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected);
      if (HasFailure()) return;
    }
  }
}

// Gradients that a store was offered are gone when their backward is repeated, and where a step raises.
TEST_P(EngineLanes, ALateStoreForgetsGradientsThatAreDropped) {
  ToyOptions with = options();
  with.make_store = test::make_late_store;
  Reference reference(world_size());
  for (const long micro_step : {0, 2, 4}) {
    reference.backward(micro_step);
    reference.step();
  }
  for (std::uint32_t number = 0; number < with.sim_schedule_num; ++number) {
    test::run_in_sim(with, number, [&](ToyRank& toy) {
      toy.train();
      toy.forward(kUnits);
      toy.engine().begin_backward(true);
      for (const std::size_t unit : kReversed) toy.unit_backward(unit);
      toy.engine().abort_backward();
      toy.set_micro_step(2);
      toy.train();
      if (toy.rank() == 0) toy.spoil(2);
      toy.train();
      toy.spoil(SIZE_MAX);
      toy.set_micro_step(4);
      toy.forward(kUnits);
      toy.backward(kReversed);
      EXPECT_THROW(toy.start_step(), NonFiniteGradientError);
      toy.set_micro_step(4);
      toy.train();
      EXPECT_EQ(toy.state(FullState::kMaster), reference.master);
    });
  }
}

// The step that brings a gradient that is not finite is known to be none when the next step begins, which then drops
// gradients whose reduction is still under way.
TEST_P(EngineLanes, AStepDroppedBehindABadOneLeavesNoTrace) {
  Reference reference(world_size());
  for (const long micro_step : {0, 3}) {
    reference.backward(micro_step);
    reference.step();
  }
  for (std::uint32_t number = 0; number < options().sim_schedule_num; ++number) {
    test::run_in_sim(options(), number, [&](ToyRank& toy) {
      toy.train();
      if (toy.rank() == 0) toy.spoil(2);
      toy.train();
      toy.spoil(SIZE_MAX);
      toy.forward(kUnits);
      toy.backward(kReversed);
      EXPECT_THROW(toy.start_step(), NonFiniteGradientError);
      toy.train();
      EXPECT_EQ(toy.state(FullState::kMaster), reference.master);
    });
  }
}

// Where updates begin in backward such a step leaves the engine torn, wherever it is when it learns of that, and a
// state takes it further from there.
TEST_P(EngineLanes, ATornEngineTakesAStateWhereverItLearnsOfIt) {
  constexpr std::array kKinds{FullState::kMaster, FullState::kExpAvg, FullState::kExpAvgSq};
  enum class Place { kForward, kBackward, kBehindBackward };
  ToyOptions with = options();
  with.optimizer_in_backward = true;
  const Values expected = test::reference_master(world_size(), 2);
  for (const Place place : {Place::kForward, Place::kBackward, Place::kBehindBackward}) {
    for (std::uint32_t number = 0; number < with.sim_schedule_num; ++number) {
      test::run_in_sim(with, number, [&](ToyRank& toy) {
        Engine& engine = toy.engine();
        const bool asks = toy.rank() == 0;
        const auto learn = [&] { EXPECT_THROW(static_cast<void>(engine.steps_applied()), NonFiniteGradientError); };
        toy.train();
        std::map<FullState, Values> kept;
        for (const FullState kind : kKinds) kept[kind] = toy.state(kind);
        if (asks) toy.spoil(2);
        toy.train();
        toy.spoil(SIZE_MAX);
        if (place == Place::kForward && asks) {
          engine.begin_forward(true);
          learn();
          engine.abandon_forward();
        } else {
          toy.forward(kUnits);
        }
        if (place == Place::kForward && !asks) learn();
        if (place == Place::kBackward && asks) {
          toy.begin_backward(true);
          toy.unit_backward(4);
          learn();
          engine.abort_backward();
        } else if (place != Place::kForward) {
          toy.backward(kReversed);
          if (asks) {
            learn();
          } else {
            EXPECT_THROW(toy.start_step(), NonFiniteGradientError);
          }
        }
        engine.write_full_state({.steps_applied = 1}, {}, [&](FullState kind, std::size_t parameter, float* values) {
          std::ranges::copy(kept.at(kind)[parameter], values);
        });
        toy.set_micro_step(1);
        toy.train();
        EXPECT_EQ(engine.steps_applied(), 2);
        EXPECT_EQ(toy.state(FullState::kMaster), expected);
      });
      if (HasFailure()) return;
    }
  }
}

// Of what is left behind nothing counts, nor does what is yet to be learnt of it.
TEST_P(EngineLanes, AStateIsLoadedBehindABadStepThatIsNotKnownYet) {
  constexpr std::array kKinds{FullState::kMaster, FullState::kExpAvg, FullState::kExpAvgSq};
  for (const bool scales : {false, true}) {
    ToyOptions with = options();
    with.param_dtype = with.reduce_dtype = scales ? DType::kFloat16 : DType::kBFloat16;
    with.loss_scale = {.enabled = scales, .initial_scale = 32.0, .min_scale = 32.0};
    for (std::uint32_t number = 0; number < with.sim_schedule_num; ++number) {
      test::run_in_sim(with, number, [&](ToyRank& toy) {
        std::map<FullState, Values> kept;
        for (const FullState kind : kKinds) kept[kind] = toy.state(kind);
        if (toy.rank() == 0) toy.spoil(2);
        toy.train();
        toy.spoil(SIZE_MAX);
        toy.engine().write_full_state({}, {}, [&](FullState kind, std::size_t parameter, float* values) {
          std::ranges::copy(kept.at(kind)[parameter], values);
        });
        toy.train();
        EXPECT_TRUE(toy.engine().outcome().applied);
        EXPECT_EQ(toy.engine().loss_scale(), scales ? 32.0 : 1.0);
      });
      if (HasFailure()) return;
    }
  }
}

std::int64_t gradient_bytes(ToyRank& toy) {
  return toy.engine().ledger().entry(Tier::kDevice, Category::kGradients).current_bytes;
}

std::int64_t trainable_bytes(DType dtype) {
  std::size_t bytes = 0;
  for (const test::ToyParameter& parameter : toy_parameters()) {
    if (parameter.trainable) bytes += parameter.numel * dtype_bytes(dtype);
  }
  return static_cast<std::int64_t>(bytes);
}

// One rank leaves gradients where they are, unless they have to be cast, and keeps none behind a step or an abort.
TEST(EngineLent, GradientsTakeTheirOwnBytesUntilTheStep) {
  for (const DType reduce_dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyOptions with;
    with.param_dtype = DType::kBFloat16;
    with.reduce_dtype = reduce_dtype;
    with.sim_schedule_num = test::kSimScheduleNum;
    const bool are_cast = reduce_dtype != with.param_dtype;
    for (std::uint32_t number = 0; number < with.sim_schedule_num; ++number) {
      test::run_in_sim(with, number, [&](ToyRank& toy) {
        EXPECT_EQ(gradient_bytes(toy), 0);
        for (int step = 0; step < 2; ++step) {
          toy.forward(kUnits);
          toy.backward(kReversed);
          EXPECT_GE(gradient_bytes(toy), trainable_bytes(reduce_dtype));
          EXPECT_EQ(gradient_bytes(toy) != trainable_bytes(reduce_dtype),
                    are_cast);  // then they are flat, with padding
          toy.start_step();
          EXPECT_EQ(gradient_bytes(toy), 0);
          toy.forward(kUnits);
          toy.begin_backward(true);
          toy.unit_backward(kReversed.front());
          EXPECT_GT(gradient_bytes(toy), 0);
          toy.engine().abort_backward();
          EXPECT_EQ(gradient_bytes(toy) != 0, are_cast);
        }
      });
    }
  }
}

// Where updates run in backward, at most what they have yet to read is there.
TEST(EngineLent, UpdatesInBackwardLetGoOfGradients) {
  ToyOptions with;
  with.optimizer_in_backward = true;
  with.sim_schedule_num = test::kSimScheduleNum;
  int smaller_num = 0;
  for (std::uint32_t number = 0; number < with.sim_schedule_num; ++number) {
    test::run_in_sim(with, number, [&](ToyRank& toy) {
      for (int step = 0; step < 2; ++step) {
        toy.forward(kUnits);
        toy.backward(kReversed);
        EXPECT_LE(gradient_bytes(toy), trainable_bytes(DType::kFloat32));
        smaller_num += gradient_bytes(toy) < trainable_bytes(DType::kFloat32) ? 1 : 0;
        toy.start_step();
        EXPECT_EQ(gradient_bytes(toy), 0);
      }
    });
  }
  EXPECT_GT(smaller_num, 0);
}

TEST_P(EngineLanes, OneGradientSlotServesUnitsOfEverySize) {
  ToyOptions with = options();
  with.sim_schedule_num = 1;
  if (with.world_size == 1 || with.stage == ZeroStage::kZero0 || with.stage == ZeroStage::kZero1) GTEST_SKIP();
  test::run_in_sim(with, 0, [](ToyRank& toy) {
    std::size_t largest_bytes = 0;
    for (std::size_t unit = 0; unit < toy.engine().unit_num(); ++unit) {
      largest_bytes = std::max(largest_bytes, toy.engine().unit(unit).gradient_bytes);
    }
    for (int step = 0; step < 2; ++step) {
      toy.train();
      EXPECT_EQ(toy.engine().ledger().entry(Tier::kDevice, Category::kGradientSlots).peak_bytes,
                static_cast<std::int64_t>(largest_bytes));
    }
  });
}

TEST_P(EngineLanes, BytesOfTheHostReachEveryRank) {
  run_ranks(options(), [](ToyRank& toy) {
    toy.train();
    for (int round = 0; round < 2; ++round) {
      std::string text = toy.rank() == 0 ? "of rank 0" : "of others";
      toy.engine().broadcast(reinterpret_cast<std::byte*>(text.data()), text.size());
      EXPECT_EQ(text, "of rank 0");
      toy.train();
    }
  });
}

}  // namespace
}  // namespace zb
