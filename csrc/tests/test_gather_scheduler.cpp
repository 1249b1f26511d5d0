// What gathers cost and in which state they leave units: counted collectives over passes of the toy model.
#include "zero/gather_scheduler.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "comm/shm_communicator.h"
#include "engine_support.h"
#include "kernels/cpu_device.h"
#include "rank_threads.h"

namespace zb {
namespace {

using test::kRoot;
using test::parameters_of;
using test::run_ranks;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;

const std::vector<std::size_t> kUnits{1, 2, 3, 4};
const std::vector<std::size_t> kReversed{4, 3, 2, 1};
const std::vector<std::size_t> kWithoutTwo{1, 3, 4};

ToyOptions sharded_options(int world_size, std::size_t prefetch_bytes = SIZE_MAX) {
  ToyOptions options;
  options.stage = ZeroStage::kZero3;
  options.world_size = world_size;
  options.prefetch_bytes = prefetch_bytes;
  return options;
}

std::uint64_t calls(ToyRank& toy, Collective collective) {
  return toy.engine().counters().calls[static_cast<std::size_t>(collective)];
}

std::size_t flat_num(ToyRank& toy) {
  std::size_t flats = 0;
  for (std::size_t unit = 0; unit < toy.engine().unit_num(); ++unit) flats += toy.engine().unit(unit).flats.size();
  return flats;
}

ParameterState state_of(ToyRank& toy, std::size_t unit) { return toy.engine().unit(unit).parameter_state; }

class Gathers : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(GatherScheduler, Gathers, testing::Values(2, 3));

TEST_P(Gathers, AKnownPassCostsOneExchangeAndOneGatherAUnit) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    for (int step = 0; step < 3; ++step) toy.train();
    toy.engine().reset_counters();
    toy.forward(kUnits);
    EXPECT_EQ(calls(toy, Collective::kExchange), 1U);
    EXPECT_EQ(calls(toy, Collective::kAllGather), flat_num(toy));
    toy.engine().reset_counters();
    toy.backward(kReversed);
    // The root and the last unit of the forward were kept, so backward gathers three units (four flats).
    EXPECT_EQ(calls(toy, Collective::kExchange), 1U);
    EXPECT_EQ(calls(toy, Collective::kAllGather), flat_num(toy) - 2);
    toy.start_step();
  });
}

TEST_P(Gathers, ALargeRootIsGatheredAgainForBackward) {
  ToyOptions options = sharded_options(GetParam());
  options.keep_root_bytes = 0;
  run_ranks(options, [](ToyRank& toy) {
    for (int step = 0; step < 3; ++step) toy.train();
    toy.forward(kUnits);
    EXPECT_EQ(state_of(toy, kRoot), ParameterState::kSharded);
    toy.engine().reset_counters();
    toy.backward(kReversed);
    EXPECT_EQ(calls(toy, Collective::kExchange), 1U);
    EXPECT_EQ(calls(toy, Collective::kAllGather), flat_num(toy) - 1);
    toy.start_step();
  });
}

TEST_P(Gathers, AnUnknownUnitCostsAnExchangeMore) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    // Recorded without unit 3.
    for (int step = 0; step < 2; ++step) toy.train({1, 2, 4});
    toy.engine().reset_counters();
    toy.forward({1, 2, 4, 3});
    EXPECT_EQ(calls(toy, Collective::kExchange), 3U);  // the wish, the end, and the new sequence
    toy.backward({3, 4, 2, 1});
    toy.start_step();
    toy.engine().reset_counters();
    toy.forward({1, 2, 4, 3});
    EXPECT_EQ(calls(toy, Collective::kExchange), 1U);
    toy.engine().abandon_forward();
  });
}

TEST_P(Gathers, WhatOneRankAloneGathersIsKnownFromThenOn) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    for (int step = 0; step < 2; ++step) toy.train({1, 2, 4});
    toy.train(toy.rank() == 0 ? std::vector<std::size_t>{1, 2, 4} : std::vector<std::size_t>{1, 2, 4, 3});
    toy.engine().reset_counters();
    toy.forward({1, 2, 4, 3});
    EXPECT_EQ(calls(toy, Collective::kExchange), 1U);
    toy.engine().abandon_forward();
  });
}

// Its parameters may be of modules that are still to come.
TEST_P(Gathers, TheRootStaysWhenItsGradientsHaveCome) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    for (int step = 0; step < 3; ++step) {
      toy.forward(kUnits);
      toy.engine().begin_backward(true);
      toy.unit_backward(4);
      for (const std::size_t parameter : parameters_of(kRoot)) toy.give_gradient(parameter);
      EXPECT_EQ(state_of(toy, kRoot), ParameterState::kUnsharded) << step;
      for (const std::size_t unit : {3, 2, 1}) toy.unit_backward(unit);
      EXPECT_EQ(state_of(toy, kRoot), ParameterState::kUnsharded) << step;
      toy.engine().end_backward();
      EXPECT_EQ(state_of(toy, kRoot), ParameterState::kSharded) << step;
      toy.start_step();
    }
  });
}

TEST_P(Gathers, AForwardOfTrainingKeepsWhatBackwardNeedsFirst) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    for (int step = 0; step < 2; ++step) toy.train();
    toy.forward(kUnits);
    for (const std::size_t unit : {1, 2, 3}) {
      EXPECT_EQ(state_of(toy, unit), ParameterState::kSharded) << unit;
    }
    EXPECT_EQ(state_of(toy, kRoot), ParameterState::kUnsharded);
    EXPECT_EQ(state_of(toy, 4), ParameterState::kUnsharded);
    toy.backward(kReversed);
    for (std::size_t unit = 0; unit <= 4; ++unit) EXPECT_EQ(state_of(toy, unit), ParameterState::kSharded) << unit;
    toy.start_step();
    toy.forward(kUnits, false);
    for (std::size_t unit = 0; unit <= 4; ++unit) EXPECT_EQ(state_of(toy, unit), ParameterState::kSharded) << unit;
  });
}

TEST_P(Gathers, SlotsStayWithinThePrefetchBudget) {
  run_ranks(sharded_options(GetParam(), 0), [](ToyRank& toy) {
    const auto gather_slots = [&] { return toy.engine().ledger().entry(Tier::kDevice, Category::kGatherSlots); };
    const std::size_t root_bytes = toy.engine().unit(kRoot).gather_bytes;
    std::size_t largest_bytes = 0;  // but the root's and those of its size
    for (std::size_t unit = 0; unit <= 4; ++unit) {
      const std::size_t bytes = toy.engine().unit(unit).gather_bytes;
      if (bytes != root_bytes) largest_bytes = std::max(largest_bytes, bytes);
    }
    const auto one_and_the_root = static_cast<std::int64_t>(largest_bytes + root_bytes);
    EXPECT_EQ(gather_slots().current_bytes, one_and_the_root);  // with no budget one unit is there, of any size
    for (int step = 0; step < 3; ++step) toy.train();
    // The root, which stays all through a forward, may share its class with a unit, which then takes a spare.
    EXPECT_LE(gather_slots().peak_bytes, one_and_the_root + static_cast<std::int64_t>(root_bytes));
    EXPECT_EQ(gather_slots().current_bytes, one_and_the_root);
  });
}

TEST_P(Gathers, PrefetchReachesAsFarAsTheBudget) {
  std::vector<std::size_t> bytes(5);
  run_ranks(sharded_options(GetParam()), [&](ToyRank& toy) {
    if (toy.rank() != 0) return;
    for (std::size_t unit = 0; unit <= 4; ++unit) bytes[unit] = toy.engine().unit(unit).gather_bytes;
  });
  const std::vector<std::pair<std::size_t, std::size_t>> cases{
      {bytes[2] - 1, 0}, {bytes[2], 1}, {bytes[2] + bytes[3] - 1, 1}, {bytes[2] + bytes[3], 2}};
  for (const auto& [budget, ahead] : cases) {
    run_ranks(sharded_options(GetParam(), budget), [&](ToyRank& toy) {
      // What passes used or dropped, as this rank drops unit 2 in the last, counts no more.
      for (int step = 0; step < 4; ++step) toy.train(step == 3 && toy.rank() == 1 ? kWithoutTwo : kUnits);
      toy.engine().begin_forward(true);
      toy.engine().pre_forward(kRoot);
      toy.engine().pre_forward(1);
      std::size_t started_num = 0;
      for (const std::size_t unit : {2, 3, 4}) started_num += state_of(toy, unit) != ParameterState::kSharded ? 1 : 0;
      EXPECT_EQ(started_num, ahead) << budget;
      toy.engine().abandon_forward();
    });
  }
}

TEST_P(Gathers, AUnitLandsInTheSameSlotStepAfterStep) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    std::vector<std::vector<const std::byte*>> places;
    for (int step = 0; step < 4; ++step) {
      toy.engine().begin_forward(true);
      std::vector<const std::byte*> of_step;
      for (std::size_t unit = 0; unit <= 4; ++unit) {
        toy.engine().pre_forward(unit);
        of_step.push_back(toy.tensor(parameters_of(unit).front()).data);
        if (unit != kRoot) toy.engine().post_forward(unit);
      }
      toy.engine().post_forward(kRoot);
      toy.engine().end_forward();
      toy.backward(kReversed);
      toy.start_step();
      places.push_back(of_step);
    }
    EXPECT_EQ(places[2], places[3]);  // the sequences are known by then
  });
}

TEST_P(Gathers, AnUnitOutsideAPassIsRefusedUnlessGathered) {
  run_ranks(sharded_options(GetParam()), [](ToyRank& toy) {
    EXPECT_THROW(toy.engine().pre_forward(2), StateError);
    toy.engine().gather({2});
    toy.engine().pre_forward(2);
    toy.engine().post_forward(2);
    toy.expect_readable(2);
    toy.engine().end_gather({2}, -1);
    EXPECT_EQ(state_of(toy, 2), ParameterState::kSharded);
  });
}

// Such as a model's frozen part, for which no update is waited, after it was made, loaded or written by a user.
TEST(FrozenShards, AreGatheredBehindWhatWasWrittenThere) {
  test::SimWorld world(1, {.policy = test::SimPolicy::kNone});
  const auto device = world.make_device(0);
  const auto communicator = world.make_communicator(device, 0, Lane::kGather, std::chrono::seconds(60));
  std::vector<Parameter> parameters;
  std::vector<Unit> units =
      make_units({"root", "a"}, 0, {{.name = "p", .numel = 64, .trainable = false, .unit = 1}}, 1, parameters);
  FlatBuffer& flat = units[1].flats[0];
  flat.parameters.clear();  // which would have to be bound
  flat.shard_parameters = {
      communicator->allocate(flat.shard_parameter_bytes(), BufferRole::kShared, nullptr, Category::kParameters)};
  units[1].set_parameter_state(ParameterState::kSharded);
  const auto store = make_device_store(nullptr, {device, std::make_shared<test::SimAdam>(device)});
  CommunicationClock clock;
  GatherScheduler gathers(*device, *communicator, *store, nullptr, units, parameters, clock, {.sharded = true});
  gathers.reserve_slots();
  device->zero(Lane::kCompute, flat.shard_parameters.data(), flat.shard_parameter_bytes());
  flat.written = device->mark(Lane::kCompute);
  gathers.gather({1});
  gathers.release_all();
  device->synchronize();
}

// [Note: staging shards] A peer that is late finds there what was fetched for the gather that it waits for.
TEST(StagingShards, AreWrittenAgainOnceThePeersHaveReadThem) {
  constexpr std::size_t kNumel = 64;  // of a rank's shard
  const std::string rendezvous = test::unique_rendezvous();
  test::rethrow_first(test::run_rank_threads(2, [&](int rank) {
    const auto communicator = make_shm_communicator({.rank = rank, .world_size = 2, .rendezvous = rendezvous});
    if (rank == 1) {  // starts its gathers at once, and waits for them late
      const Region source{communicator->allocate(kNumel * 2, BufferRole::kShared, nullptr, Category::kStaging)};
      std::array<Region, 2> full;
      std::array<WorkPtr, 2> works;
      for (std::size_t unit = 0; unit < 2; ++unit) {
        full[unit] = {communicator->allocate(2 * kNumel * 2, BufferRole::kPrivate, nullptr, Category::kStaging)};
        works[unit] = communicator->start_all_gather(
            {.source = source, .destination = full[unit], .shard_bytes = kNumel * 2, .label = "late"});
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      for (std::size_t unit = 0; unit < 2; ++unit) {
        works[unit]->wait();
        float found = 0.0F;
        cpu_kernels().cast(&found, DType::kFloat32, full[unit].data(), DType::kBFloat16, 1);
        EXPECT_EQ(found, 1.0F + static_cast<float>(unit));
      }
      works[1]->wait_source_free();
      return;
    }
    std::vector<Parameter> parameters;
    std::vector<Unit> units =
        make_units({"root", "a", "b"}, 0,
                   {{.name = "a", .numel = 2 * kNumel, .param_dtype = DType::kBFloat16, .unit = 1},
                    {.name = "b", .numel = 2 * kNumel, .param_dtype = DType::kBFloat16, .unit = 2}},
                   2, parameters);
    const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
    const auto store = make_device_store_with_masters(nullptr, parts);
    for (std::size_t unit = 1; unit <= 2; ++unit) {
      units[unit].fetch_parameters_of([](const FlatBuffer& flat) { return flat.trainable; });
      FlatBuffer& flat = units[unit].flats[0];
      flat.store_shard = store->add_shard({kNumel, DType::kBFloat16, DType::kFloat32, {{0, kNumel, 0}}},
                                          std::vector<float>(kNumel, static_cast<float>(unit)));
      flat.parameters.clear();  // which would have to be bound
      units[unit].set_parameter_state(ParameterState::kSharded);
    }
    CommunicationClock clock;
    GatherScheduler gathers(*parts.device, *communicator, *store, nullptr, units, parameters, clock, {.sharded = true});
    gathers.reserve_slots();
    gathers.gather({1});
    gathers.gather({2});
    gathers.release_all();
  }));
}

}  // namespace
}  // namespace zb
