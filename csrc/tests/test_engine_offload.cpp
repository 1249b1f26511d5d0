// The engine with its optimizer state on the host, whole or in part, against the state on the device: the same bits at
// every stage, on the CPU with a thread of updates and on devices whose lanes run late.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "engine_steps.h"
#include "engine_support.h"
#include "host_stores.h"
#include "reference.h"

namespace zb {
namespace {

using test::kReversed;
using test::kUnits;
using test::Reference;
using test::run_ranks;
using test::same_on_all;
using test::ToyOptions;
using test::ToyRank;
using test::Values;
using test::walk;

using EngineOffload = test::StageTest;

INSTANTIATE_TEST_SUITE_P(OnCpu, EngineOffload, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(InSim, EngineOffload, test::in_sim(testing::Range(1, 3), test::kOffloadSimScheduleNum),
                         test::stage_test_name);

TEST_P(EngineOffload, EndsAsTheDeviceStoreDoes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    ToyOptions with = options();
    with.param_dtype = dtype;
    with.reduce_dtype = dtype == DType::kBFloat16 && world_size() == 2 ? DType::kFloat32 : dtype;
    with.accumulation_steps = dtype == DType::kFloat32 ? 2 : 1;
    with.clip = dtype == DType::kBFloat16 ? 0.5 : 0.0;
    with.loss_scale = {.enabled = dtype == DType::kFloat16, .initial_scale = 64.0};
    ToyOptions on_device = with;
    on_device.sim_schedule_num = 0;
    const Values expected = same_on_all(on_device, [&](ToyRank& toy) { return walk(toy, with); });
    for (const auto make_store : {test::make_small_host_store, test::make_third_store, test::make_swapping_store,
                                  test::make_half_swapping_store}) {
      with.make_store = make_store;
      with.keep_parameter_shards = true;
      EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected) << dtype_name(dtype);
      if (HasFailure()) return;
    }
    if (with.stage != ZeroStage::kZero3 || world_size() == 1) continue;
    with.keep_parameter_shards = false;
    for (const auto make_store :
         {test::make_home_store, test::make_swapping_home_store, test::make_half_swapping_home_store}) {
      with.make_store = make_store;
      EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected) << dtype_name(dtype);
      if (HasFailure()) return;
    }
  }
}

// Where state lies is chosen behind the first backward, whose gradients are then updated there; with the optimizer in
// backward from the second step on.
TEST_P(EngineOffload, APlaceChosenBehindATrialEndsAsTheDeviceStoreDoes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    ToyOptions with = options();
    with.param_dtype = with.reduce_dtype = dtype;
    with.accumulation_steps = dtype == DType::kFloat32 ? 2 : 1;
    with.loss_scale = {.enabled = dtype == DType::kFloat16, .initial_scale = 64.0};
    ToyOptions on_device = with;
    on_device.sim_schedule_num = 0;
    const Values expected = same_on_all(on_device, [&](ToyRank& toy) { return walk(toy, with); });
    with.make_store = test::make_store_on_trial;
    with.keep_parameter_shards = true;
    for (const double fitting : {0.0, 0.3333, 1.0}) {
      with.fitting_share = fitting;
      with.optimizer_in_backward = dtype == DType::kBFloat16 && fitting > 0.0;
      EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected)
          << dtype_name(dtype) << " " << fitting;
      if (HasFailure()) return;
    }
  }
}

// The ranks agree on what fits everywhere, in thousandths that fit, and choose once.
TEST_P(EngineOffload, TheSmallestDeviceDecidesOnThePlace) {
  ToyOptions with = options();
  with.sim_schedule_num = 0;
  with.make_store = test::make_store_on_trial;
  with.keep_parameter_shards = true;
  run_ranks(with, [&](ToyRank& toy) {
    EXPECT_TRUE(toy.engine().awaits_share());
    const Values before = toy.state(FullState::kMaster);
    EXPECT_THROW(toy.engine().step(test::toy_groups()), StateError);
    toy.forward(kUnits);
    toy.backward(kReversed);
    EXPECT_DOUBLE_EQ(toy.engine().place_state(0.6239 - 0.1 * toy.rank()),
                     1.0 - (623.0 - 100.0 * (world_size() - 1)) / 1000.0);
    EXPECT_FALSE(toy.engine().awaits_share());
    EXPECT_EQ(toy.state(FullState::kMaster), before);
    if (world_size() == 1) {  // the shards of more ranks are too small to be split
      EXPECT_GT(toy.engine().ledger().entry(Tier::kDevice, Category::kExpAvg).current_bytes, 0);
    }
    EXPECT_GT(toy.engine().ledger().entry(Tier::kHost, Category::kExpAvg).current_bytes, 0);
    toy.engine().step(test::toy_groups());
    EXPECT_NE(toy.state(FullState::kMaster), before);
  });
}

// A state that is loaded before the trial is what the trial and the place that is chosen behind it go on with.
TEST_P(EngineOffload, AStateLoadedBeforeTheTrialIsWhatItGoesOnWith) {
  constexpr std::array kKinds{FullState::kMaster, FullState::kExpAvg, FullState::kExpAvgSq};
  std::map<FullState, Values> kept;
  std::mutex mutex;
  ToyOptions with = options();
  with.param_dtype = with.reduce_dtype = DType::kBFloat16;
  ToyOptions on_device = with;
  on_device.sim_schedule_num = 0;
  run_ranks(on_device, [&](ToyRank& toy) {
    toy.train();
    toy.train();
    for (const FullState kind : kKinds) {
      Values values = toy.state(kind);
      const std::lock_guard lock(mutex);
      kept[kind] = std::move(values);
    }
  });
  const auto body = [&](ToyRank& toy) {
    toy.engine().write_full_state({.steps_applied = 2}, {}, [&](FullState kind, std::size_t parameter, float* values) {
      std::ranges::copy(kept.at(kind)[parameter], values);
    });
    for (const FullState kind : kKinds) EXPECT_EQ(toy.state(kind), kept.at(kind));
    toy.set_micro_step(2);
    toy.train();
    toy.train();
    EXPECT_EQ(toy.engine().steps_applied(), 4);
    Values found;
    for (const FullState kind : kKinds) {
      for (auto& values : toy.state(kind)) found.push_back(std::move(values));
    }
    return found;
  };
  const Values expected = same_on_all(on_device, body);
  with.make_store = test::make_store_on_trial;
  with.keep_parameter_shards = true;
  for (const double fitting : {0.0, 0.3333, 1.0}) {
    with.fitting_share = fitting;
    EXPECT_EQ(same_on_all(with, body), expected) << fitting;
    if (HasFailure()) return;
  }
}

// Values that a user writes reach the master, wherever it is.
TEST_P(EngineOffload, KeepsWhatIsWrittenIntoAGather) {
  if (is_in_sim()) GTEST_SKIP() << "the toy's tensors are written on the host, beside the lanes";
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyOptions with = options();
    with.param_dtype = with.reduce_dtype = dtype;
    const auto body = [&](ToyRank& toy) {
      toy.train();
      toy.engine().gather({2});
      for (const std::size_t parameter : test::parameters_of(2)) {
        if (toy.rank() == 0) toy.tensor(parameter).set(0, 0.5F);
      }
      toy.engine().end_gather({2}, 0);
      toy.train();
      Values found = toy.state(FullState::kParameters);
      const Values masters = toy.state(FullState::kMaster);
      found.insert(found.end(), masters.begin(), masters.end());
      return found;
    };
    ToyOptions on_device = with;
    on_device.sim_schedule_num = 0;
    const Values expected = same_on_all(on_device, body);
    with.keep_parameter_shards = true;
    for (const auto make_store : {test::make_third_store, test::make_store_on_trial}) {
      with.make_store = make_store;
      with.fitting_share = 0.5;
      EXPECT_EQ(same_on_all(with, body), expected) << dtype_name(dtype);
    }
  }
}

// A step that raises changes nothing on the host either, and gradients that left for it are forgotten.
TEST_P(EngineOffload, ABadStepLeavesNoTrace) {
  ToyOptions with = options();
  with.make_store = test::make_small_host_store;
  with.keep_parameter_shards = true;
  Reference reference(world_size());
  for (const long micro_step : {0, 2}) {
    reference.backward(micro_step);
    reference.step();
  }
  run_ranks(with, [&](ToyRank& toy) {
    toy.train();
    toy.forward(kUnits);
    toy.engine().begin_backward(true);
    for (const std::size_t unit : kReversed) toy.unit_backward(unit);
    toy.engine().abort_backward();
    if (toy.rank() == 0) toy.spoil(2);
    toy.set_micro_step(1);
    toy.forward(kUnits);
    toy.backward(kReversed);
    EXPECT_THROW(
        {
          toy.start_step();
          toy.engine().outcome();
        },
        NonFiniteGradientError);
    toy.spoil(SIZE_MAX);
    toy.set_micro_step(2);
    toy.train();
    EXPECT_EQ(toy.state(FullState::kMaster), reference.master);
  });
}

// An engine may go while updates are under way.
TEST_P(EngineOffload, GoesWithUpdatesUnderWay) {
  ToyOptions with = options();
  with.make_store = test::make_third_store;
  with.keep_parameter_shards = true;
  run_ranks(with, [&](ToyRank& toy) {
    toy.forward(kUnits);
    toy.backward(kReversed);
    toy.start_step();
  });
}

}  // namespace
}  // namespace zb
