#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "common/error.h"
#include "float_support.h"
#include "kernels/cpu_device.h"
#include "sim/sim_device.h"
#include "stores/store.h"

namespace zb {
namespace {

using test::Elements;
using test::kDTypes;
using test::ordinary_floats;
using test::same_bits;

constexpr std::size_t kNumel = 9000;  // more than two pieces for the pool

constexpr StepScalars kStep{.norm = 1.0, .factor = 0.5F, .is_skipped = 0};

ShardSpec some_spec(DType param_dtype) {
  return {.numel = kNumel, .param_dtype = param_dtype, .segments = {{0, 5000, 1}, {5016, 8999, 0}}};
}

std::vector<AdamScalars> some_rows(long step) {
  AdamHyperparameters first{.lr = 1e-2, .weight_decay = 0.1};
  AdamHyperparameters second{.lr = 3e-3, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 0.0};
  return {make_adam_scalars(first, step, kStep.factor), make_adam_scalars(second, step, kStep.factor)};
}

std::vector<float> state_of(Store& store, std::size_t shard, StateKind kind) {
  std::vector<float> values(kNumel);
  store.read_state(shard, kind, values);
  return values;
}

std::int64_t current_bytes(const Ledger& ledger, Category category) {
  return ledger.entry(Tier::kDevice, category).current_bytes;
}

TEST(DeviceStore, CountsEveryByteAndMakesNoMasterForFloat32) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  {
    const std::unique_ptr<Store> store = make_device_store(&ledger, parts);
    EXPECT_EQ(store->tier(), Tier::kDevice);
    const std::vector<float> initial = ordinary_floats(kNumel, 1);
    EXPECT_EQ(store->add_shard(some_spec(DType::kFloat32), initial), 0U);
    EXPECT_EQ(current_bytes(ledger, Category::kMaster), 0);
    EXPECT_EQ(store->add_shard(some_spec(DType::kBFloat16), initial), 1U);
    EXPECT_EQ(current_bytes(ledger, Category::kMaster), 4 * static_cast<std::int64_t>(kNumel));
    EXPECT_EQ(current_bytes(ledger, Category::kExpAvg), 8 * static_cast<std::int64_t>(kNumel));
    EXPECT_EQ(current_bytes(ledger, Category::kExpAvgSq), 8 * static_cast<std::int64_t>(kNumel));
    EXPECT_EQ(ledger.total(Tier::kDevice).current_bytes, 20 * static_cast<std::int64_t>(kNumel));
    EXPECT_EQ(state_of(*store, 1, StateKind::kMaster), initial);
    EXPECT_EQ(state_of(*store, 1, StateKind::kExpAvg), std::vector<float>(kNumel, 0.0F));
    EXPECT_EQ(state_of(*store, 0, StateKind::kExpAvgSq), std::vector<float>(kNumel, 0.0F));
  }
  EXPECT_EQ(ledger.total(Tier::kDevice).current_bytes, 0);
}

// Three steps against the scalar Adam, segment by segment.
void expect_updates_like_scalar(DType param_dtype, DType gradient_dtype, std::size_t thread_num) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(thread_num, {})};
  const std::unique_ptr<Store> store = make_device_store(&ledger, parts);
  const ShardSpec spec = some_spec(param_dtype);
  std::vector<float> master = ordinary_floats(kNumel, 1);
  Elements parameters(param_dtype, master, 1);
  Elements expected_parameters = parameters;
  const std::size_t shard = store->add_shard(spec, master);
  std::vector<float> exp_avg(kNumel, 0.0F);
  std::vector<float> exp_avg_sq(kNumel, 0.0F);
  for (long step = 1; step <= 3; ++step) {
    const Elements gradient(gradient_dtype, ordinary_floats(kNumel, static_cast<std::uint32_t>(10 + step)), 1);
    const std::vector<AdamScalars> rows = some_rows(step);
    for (const Segment& segment : spec.segments) {
      const auto gradient_bytes = static_cast<const char*>(gradient.data());
      auto low = static_cast<char*>(expected_parameters.data());
      adam_function(Isa::kScalar)({.master = master.data() + segment.begin,
                                   .exp_avg = exp_avg.data() + segment.begin,
                                   .exp_avg_sq = exp_avg_sq.data() + segment.begin,
                                   .gradient = gradient_bytes + segment.begin * dtype_bytes(gradient_dtype),
                                   .gradient_dtype = gradient_dtype,
                                   .low_precision = low + segment.begin * dtype_bytes(param_dtype),
                                   .low_precision_dtype = param_dtype,
                                   .numel = segment.end - segment.begin},
                                  rows[static_cast<std::size_t>(segment.row)]);
    }
    store->start_update(shard, {.gradient = gradient.data(),
                                .gradient_dtype = gradient_dtype,
                                .parameters = parameters.data(),
                                .rows = rows,
                                .step = &kStep});
    store->wait_update(shard, Lane::kCompute);
    ASSERT_EQ(parameters.first_difference(expected_parameters), -1) << "step " << step;
  }
  EXPECT_EQ(state_of(*store, shard, StateKind::kExpAvg), exp_avg);
  EXPECT_EQ(state_of(*store, shard, StateKind::kExpAvgSq), exp_avg_sq);
  if (param_dtype != DType::kFloat32) {
    EXPECT_EQ(state_of(*store, shard, StateKind::kMaster), master);
  }
}

TEST(DeviceStore, UpdatesBySegmentsLikeTheScalarAdam) {
  for (const DType param_dtype : kDTypes) {
    for (const DType gradient_dtype : kDTypes) {
      for (const std::size_t thread_num : {1, 3}) {
        SCOPED_TRACE(std::string(dtype_name(param_dtype)) + " " + std::string(dtype_name(gradient_dtype)));
        expect_updates_like_scalar(param_dtype, gradient_dtype, thread_num);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Three steps of two shards of the same values, one by a flat gradient and one by pieces of it that lie anywhere.
TEST(DeviceStore, TakesAGradientInPieces) {
  constexpr std::array<std::pair<std::size_t, std::size_t>, 5> kPlaces{
      {{0, 1}, {16, 1203}, {1232, 3768}, {5016, 16}, {5040, 3959}}};  // two of the first segment end before it does
  for (const DType param_dtype : kDTypes) {
    for (const DType gradient_dtype : kDTypes) {
      SCOPED_TRACE(std::string(dtype_name(param_dtype)) + " " + std::string(dtype_name(gradient_dtype)));
      const auto with_padding = [&](std::vector<float> values) {
        std::vector<float> padded(kNumel, 0.0F);
        for (const auto& [begin, numel] : kPlaces) std::copy_n(&values[begin], numel, &padded[begin]);
        return padded;
      };
      Ledger ledger;
      const std::unique_ptr<Store> store = make_device_store(&ledger, {make_cpu_device(), make_cpu_adam(2, {})});
      ASSERT_TRUE(store->takes_pieces());
      const std::vector<float> master = with_padding(ordinary_floats(kNumel, 1));
      std::vector<Elements> parameters(2, Elements(param_dtype, master, 1));
      for (int shard = 0; shard < 2; ++shard) store->add_shard(some_spec(param_dtype), master);
      for (long step = 1; step <= 3; ++step) {
        const std::vector<float> values = with_padding(ordinary_floats(kNumel, static_cast<std::uint32_t>(10 + step)));
        const Elements flat(gradient_dtype, values, 1);
        std::vector<Elements> copies;
        for (const auto& [begin, numel] : kPlaces) {
          copies.emplace_back(gradient_dtype, std::vector<float>(&values[begin], &values[begin] + numel), begin % 3);
        }
        std::vector<FlatPiece> pieces;
        for (std::size_t i = 0; i < kPlaces.size(); ++i) {
          pieces.push_back({.begin = kPlaces[i].first, .numel = kPlaces[i].second, .data = copies[i].data()});
        }
        const std::vector<AdamScalars> rows = some_rows(step);
        ShardUpdate update{.gradient = flat.data(),
                           .gradient_dtype = gradient_dtype,
                           .parameters = parameters[0].data(),
                           .rows = rows,
                           .step = &kStep};
        store->start_update(0, update);
        update.gradient = nullptr;
        update.gradient_pieces = pieces;
        update.parameters = parameters[1].data();
        store->start_update(1, update);
        for (const std::size_t shard : {0U, 1U}) store->wait_update(shard, Lane::kCompute);
        ASSERT_EQ(parameters[1].first_difference(parameters[0]), -1) << "step " << step;
      }
      EXPECT_EQ(state_of(*store, 1, StateKind::kExpAvg), state_of(*store, 0, StateKind::kExpAvg));
      EXPECT_EQ(state_of(*store, 1, StateKind::kExpAvgSq), state_of(*store, 0, StateKind::kExpAvgSq));
    }
  }
}

TEST(DeviceStore, UpdatesStartedTogetherAreThoseOfEach) {
  Ledger ledger;
  const std::unique_ptr<Store> store = make_device_store(&ledger, {make_cpu_device(), make_cpu_adam(2, {})});
  const std::vector<DType> dtypes{DType::kFloat32, DType::kBFloat16, DType::kBFloat16};
  const std::vector<AdamScalars> rows = some_rows(1);
  std::vector<Elements> parameters;
  std::vector<std::vector<float>> gradients;
  std::vector<std::pair<std::size_t, ShardUpdate>> updates;
  for (std::size_t i = 0; i < 2 * dtypes.size(); ++i) {  // each twice
    const std::vector<float> master = ordinary_floats(kNumel, static_cast<std::uint32_t>(1 + i / 2));
    gradients.push_back(ordinary_floats(kNumel, static_cast<std::uint32_t>(10 + i / 2)));
    parameters.emplace_back(dtypes[i / 2], master, 1);
    store->add_shard(some_spec(dtypes[i / 2]), master);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    updates.emplace_back(
        i,
        ShardUpdate{.gradient = gradients[i].data(), .parameters = parameters[i].data(), .rows = rows, .step = &kStep});
  }
  std::vector<std::pair<std::size_t, ShardUpdate>> together;
  for (std::size_t i = 0; i < updates.size(); i += 2) {
    store->start_update(i, updates[i].second);
    together.push_back(updates[i + 1]);
  }
  store->start_updates(together);
  store->start_updates({});
  for (std::size_t i = 0; i < updates.size(); i += 2) {
    for (const std::size_t shard : {i, i + 1}) store->wait_update(shard, Lane::kCompute);
    EXPECT_EQ(parameters[i + 1].first_difference(parameters[i]), -1) << "shard " << i;
    EXPECT_EQ(state_of(*store, i + 1, StateKind::kExpAvg), state_of(*store, i, StateKind::kExpAvg));
    EXPECT_EQ(state_of(*store, i + 1, StateKind::kExpAvgSq), state_of(*store, i, StateKind::kExpAvgSq));
  }
  const StepScalars other = kStep;
  together.back().second.step = &other;
  EXPECT_THROW(store->start_updates(together), ArgumentError);
}

// Three steps of a shard with whole masters and of one with remainders, in one call and in pieces of a gradient.
TEST(DeviceStore, RemaindersOfMastersAreUpdatedAsTheyAre) {
  for (const DType gradient_dtype : kDTypes) {
    Ledger ledger;
    const std::unique_ptr<Store> store = make_device_store(&ledger, {make_cpu_device(), make_cpu_adam(2, {})});
    ASSERT_TRUE(store->takes_remainders());
    const std::vector<float> initial = ordinary_floats(kNumel, 1);
    std::vector<Elements> parameters(2, Elements(DType::kBFloat16, initial, 1));
    ShardSpec spec = some_spec(DType::kBFloat16);
    store->add_shard(spec, initial);
    const std::int64_t before = current_bytes(ledger, Category::kMaster);
    spec.parameters = parameters[1].data();
    store->add_shard(spec, initial);
    EXPECT_EQ(current_bytes(ledger, Category::kMaster) - before, 2 * static_cast<std::int64_t>(kNumel));
    EXPECT_EQ(state_of(*store, 1, StateKind::kMaster), initial);
    EXPECT_EQ(state_of(*store, 1, StateKind::kExpAvgSq), std::vector<float>(kNumel, 0.0F));
    for (long step = 1; step <= 3; ++step) {
      const Elements gradient(gradient_dtype, ordinary_floats(kNumel, static_cast<std::uint32_t>(10 + step)), 1);
      const std::vector<AdamScalars> rows = some_rows(step);
      for (const std::size_t shard : {0U, 1U}) {
        ShardUpdate update{
            .gradient_dtype = gradient_dtype, .parameters = parameters[shard].data(), .rows = rows, .step = &kStep};
        const std::array<FlatPiece, 1> whole{{{.begin = 0, .numel = kNumel, .data = gradient.data()}}};
        if (step == 2) {
          update.gradient_pieces = whole;
        } else {
          update.gradient = gradient.data();
        }
        store->start_update(shard, update);
        store->wait_update(shard, Lane::kCompute);
      }
      ASSERT_EQ(parameters[1].first_difference(parameters[0]), -1) << "step " << step;
      for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
        ASSERT_EQ(state_of(*store, 1, kind), state_of(*store, 0, kind)) << "step " << step;
      }
    }
  }
}

TEST(DeviceStore, StatesAreWrittenBesideRemaindersInAnyOrder) {
  Ledger ledger;
  const std::unique_ptr<Store> store = make_device_store(&ledger, {make_cpu_device(), make_cpu_adam(2, {})});
  Elements parameters(DType::kBFloat16, ordinary_floats(kNumel, 1), 1);
  ShardSpec spec = some_spec(DType::kBFloat16);
  spec.parameters = parameters.data();
  store->add_shard(spec, ordinary_floats(kNumel, 1));
  std::vector<float> squares = ordinary_floats(kNumel, 3);
  for (float& square : squares) square = std::fabs(square);
  const std::vector<float> moments = ordinary_floats(kNumel, 4);
  for (const bool master_first : {false, true}) {
    const std::vector<float> masters = ordinary_floats(kNumel, master_first ? 5 : 6);
    parameters = Elements(DType::kBFloat16, masters, 1);
    spec.parameters = parameters.data();
    const std::size_t shard = store->add_shard(spec, masters);
    if (master_first) store->write_state(shard, StateKind::kMaster, masters);
    store->write_state(shard, StateKind::kExpAvgSq, squares);
    store->write_state(shard, StateKind::kExpAvg, moments);
    if (!master_first) store->write_state(shard, StateKind::kMaster, masters);
    EXPECT_EQ(state_of(*store, shard, StateKind::kMaster), masters);
    EXPECT_EQ(state_of(*store, shard, StateKind::kExpAvgSq), squares);
    EXPECT_EQ(state_of(*store, shard, StateKind::kExpAvg), moments);
  }
}

TEST(DeviceStore, RemaindersAreOfBFloat16ParametersThatStayWhereTheyAre) {
  Ledger ledger;
  const std::unique_ptr<Store> store = make_device_store(&ledger, {make_cpu_device(), make_cpu_adam(1, {})});
  const std::vector<float> values = ordinary_floats(kNumel, 1);
  Elements parameters(DType::kBFloat16, values, 0);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    ShardSpec spec = some_spec(dtype);
    spec.parameters = parameters.data();
    EXPECT_THROW(store->add_shard(spec, values), ArgumentError);
  }
  ShardSpec spec = some_spec(DType::kBFloat16);
  spec.parameters = parameters.data();
  const std::size_t shard = store->add_shard(spec, values);
  Elements others = parameters;
  const std::vector<AdamScalars> rows = some_rows(1);
  EXPECT_THROW(store->start_update(shard, {.gradient = values.data(),
                                           .gradient_dtype = DType::kFloat32,
                                           .parameters = others.data(),
                                           .rows = rows,
                                           .step = &kStep}),
               ArgumentError);
  EXPECT_THROW(store->fetch_parameters(shard, Lane::kCompute, others.data()), StateError);
}

TEST(DeviceStore, ASkippedStepChangesNothing) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(2, {})};
  const std::unique_ptr<Store> store = make_device_store(&ledger, parts);
  const std::vector<float> master = ordinary_floats(kNumel, 1);
  Elements parameters(DType::kBFloat16, master, 1);
  const Elements before = parameters;
  const std::size_t shard = store->add_shard(some_spec(DType::kBFloat16), master);
  const std::vector<AdamScalars> rows = some_rows(1);
  const StepScalars skipped{.factor = 0.5F, .is_skipped = 1};
  const std::vector<float> gradient = ordinary_floats(kNumel, 2);
  store->start_update(shard,
                      {.gradient = gradient.data(), .parameters = parameters.data(), .rows = rows, .step = &skipped});
  store->wait_update(shard, Lane::kCompute);
  EXPECT_EQ(parameters.first_difference(before), -1);
  EXPECT_EQ(state_of(*store, shard, StateKind::kMaster), master);
  EXPECT_EQ(state_of(*store, shard, StateKind::kExpAvg), std::vector<float>(kNumel, 0.0F));
}

TEST(DeviceStore, StatesAreWrittenAndRead) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  const std::unique_ptr<Store> store = make_device_store(&ledger, parts);
  const std::size_t shard = store->add_shard(some_spec(DType::kFloat16), std::vector<float>(kNumel, 0.0F));
  std::uint32_t seed = 1;
  for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    store->write_state(shard, kind, ordinary_floats(kNumel, seed++));
  }
  seed = 1;
  for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    EXPECT_EQ(state_of(*store, shard, kind), ordinary_floats(kNumel, seed++));
  }
}

// Without an engine whose lanes wait for each other anyway.
TEST(DeviceStore, AnUpdateInALaneIsBehindAWriteInAnother) {
  const auto device = std::make_shared<test::SimDevice>(test::SimSchedule{.policy = test::SimPolicy::kNone});
  const auto store = make_device_store_with_masters(nullptr, {device, std::make_shared<test::SimAdam>(device)});
  const std::size_t bytes = 64 * sizeof(float);
  const auto values = device->allocate(bytes, "values");
  const auto gradient = device->allocate(bytes, "a gradient");
  const auto scalars = device->allocate(sizeof(StepScalars), "scalars");
  const std::span<float> all(reinterpret_cast<float*>(values.get()), 64);
  store->add_shard({.numel = 64, .segments = {{0, 64, 0}}}, all);
  store->write_state(0, StateKind::kExpAvg, all);
  const std::vector<AdamScalars> rows = some_rows(1);
  store->start_update(0, {.lane = Lane::kReduce,
                          .gradient = gradient.get(),
                          .rows = rows,
                          .step = reinterpret_cast<StepScalars*>(scalars.get())});
  store->read_state(0, StateKind::kExpAvg, all);
  device->synchronize();
}

TEST(DeviceStore, EmptyShardsAreFine) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(2, {})};
  const std::unique_ptr<Store> store = make_device_store(&ledger, parts);
  const std::size_t shard = store->add_shard({.numel = 0, .param_dtype = DType::kBFloat16, .segments = {}}, {});
  store->start_update(shard, {});
  store->wait_update(shard, Lane::kCompute);
  store->read_state(shard, StateKind::kMaster, {});
  EXPECT_EQ(ledger.total(Tier::kDevice).current_bytes, 0);
}

TEST(DeviceStore, RejectsWhatCannotBe) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  const std::unique_ptr<Store> store = make_device_store(&ledger, parts);
  const std::vector<float> initial(kNumel, 1.0F);
  ShardSpec spec = some_spec(DType::kFloat32);
  EXPECT_THROW(store->add_shard(spec, std::span(initial).first(5)), ArgumentError);
  spec.segments = {{0, kNumel + 1, 0}};
  EXPECT_THROW(store->add_shard(spec, initial), ArgumentError);
  spec.segments = {{10, 20, 0}, {15, 30, 1}};
  EXPECT_THROW(store->add_shard(spec, initial), ArgumentError);
  spec.segments = {{10, 20, -1}};
  EXPECT_THROW(store->add_shard(spec, initial), ArgumentError);

  const std::size_t shard = store->add_shard(some_spec(DType::kFloat32), initial);
  std::vector<float> values(kNumel);
  EXPECT_THROW(store->read_state(shard, StateKind::kMaster, values), StateError);
  EXPECT_THROW(store->write_state(shard, StateKind::kMaster, values), StateError);
  EXPECT_THROW(store->read_state(shard, StateKind::kExpAvg, std::span(values).first(3)), ArgumentError);
  EXPECT_THROW(store->read_state(shard + 1, StateKind::kExpAvg, values), ArgumentError);
  EXPECT_THROW(store->wait_update(shard + 1, Lane::kCompute), ArgumentError);
  const std::vector<AdamScalars> rows = some_rows(1);
  const auto update = [&](const void* gradient, std::size_t row_num, const StepScalars* step) {
    store->start_update(
        shard,
        {.gradient = gradient, .parameters = values.data(), .rows = std::span(rows).first(row_num), .step = step});
  };
  EXPECT_THROW(update(nullptr, 2, &kStep), ArgumentError);
  EXPECT_THROW(update(initial.data(), 1, &kStep), ArgumentError);
  EXPECT_THROW(update(initial.data(), 2, nullptr), ArgumentError);
}

}  // namespace
}  // namespace zb
