#include "stores/host_store.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>

#include "common/error.h"
#include "float_support.h"
#include "host_stores.h"
#include "io_support.h"
#include "kernels/cpu_device.h"
#include "stores/host_store_memory.h"
#include "stores/split_store.h"
#include "thread_device.h"

namespace zb {
namespace {

using test::Elements;
using test::kDTypes;
using test::ordinary_floats;

constexpr StepScalars kStep{.norm = 1.0, .factor = 0.5F, .is_skipped = 0};
constexpr StepScalars kSkipped{.norm = 1.0, .factor = 0.5F, .is_skipped = 1};

struct ShardCase {
  std::size_t numel;
  std::vector<Segment> segments;
};

const std::vector<ShardCase> kCases{{9000, {{0, 5000, 1}, {5016, 8999, 0}}},
                                    {64, {{0, 3, 0}}},
                                    {128, {}},
                                    {1000, {{100, 200, 1}, {200, 300, 0}, {700, 1000, 1}}},
                                    {0, {}}};

std::vector<ShardSpec> specs_of(DType param_dtype, DType gradient_dtype) {
  std::vector<ShardSpec> specs;
  for (const ShardCase& shard : kCases) specs.push_back({shard.numel, param_dtype, gradient_dtype, shard.segments});
  return specs;
}

std::vector<AdamScalars> some_rows(long step) {
  return {make_adam_scalars({.lr = 1e-2, .weight_decay = 0.1}, step, 0.0F),
          make_adam_scalars({.lr = 3e-3, .beta1 = 0.8, .weight_decay = 0.2, .kind = WeightDecayKind::kL2}, step, 0.0F)};
}

// Everything that a store and the parameters hold after some steps, of which the second is skipped.
struct Outcome {
  std::vector<std::vector<float>> states;
  std::vector<Elements> parameters;
};

Outcome run_steps(Store& store, DType param_dtype, DType gradient_dtype) {
  const std::vector<ShardSpec> specs = specs_of(param_dtype, gradient_dtype);
  store.reserve(specs);
  Outcome outcome;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::vector<float> initial = ordinary_floats(specs[i].numel, static_cast<std::uint32_t>(i));
    EXPECT_EQ(store.add_shard(specs[i], initial), i);
    outcome.parameters.emplace_back(param_dtype, initial, 0);
  }
  for (long step = 1; step <= 4; ++step) {
    const std::vector<AdamScalars> rows = some_rows(step);
    std::vector<Elements> gradients;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      gradients.emplace_back(gradient_dtype,
                             ordinary_floats(specs[i].numel, static_cast<std::uint32_t>(100 * step) + i % 7), 0);
    }
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (step % 2 == 0) store.offer_gradient(i, {.data = gradients[i].data(), .dtype = gradient_dtype});
    }
    if (step == 4) store.drop_gradients(Lane::kCompute);
    const StepScalars& scalars = step == 2 ? kSkipped : kStep;
    for (std::size_t i = specs.size(); i-- > 0;) {
      store.start_update(i, {.gradient = gradients[i].data(),
                             .gradient_dtype = gradient_dtype,
                             .parameters = outcome.parameters[i].data(),
                             .rows = rows,
                             .step = &scalars,
                             .step_on_host = &scalars});
    }
    for (std::size_t i = 0; i < specs.size(); ++i) {
      store.wait_update(i, Lane::kCompute);
      EXPECT_TRUE(store.is_issued(i));
    }
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      outcome.states.emplace_back(specs[i].numel);
      store.read_state(i, kind, outcome.states.back());
    }
    Elements fetched(param_dtype, specs[i].numel, 0);
    store.fetch_parameters(i, Lane::kCompute, fetched.data());
    EXPECT_EQ(fetched.first_difference(outcome.parameters[i]), -1) << "fetched parameters of shard " << i;
  }
  return outcome;
}

void expect_same(const Outcome& found, const Outcome& expected) {
  EXPECT_EQ(found.states, expected.states);
  for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_EQ(found.parameters[i].first_difference(expected.parameters[i]), -1) << "shard " << i;
  }
}

TEST(HostStore, GivesTheBitsOfTheDeviceStoreWholeOrSplit) {
  for (const DType param_dtype : kDTypes) {
    for (const DType gradient_dtype : kDTypes) {
      SCOPED_TRACE(std::string(dtype_name(param_dtype)) + " " + std::string(dtype_name(gradient_dtype)));
      const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
      const auto on_device = make_device_store_with_masters(nullptr, parts);
      const Outcome expected = run_steps(*on_device, param_dtype, gradient_dtype);
      for (const std::size_t thread_num : {1, 3}) {
        const auto on_host = make_host_store(nullptr, parts, test::small_chunks(parts, thread_num));
        expect_same(run_steps(*on_host, param_dtype, gradient_dtype), expected);
      }
      for (const double share : {0.0, 0.01, 0.5, 0.77, 1.0}) {
        const auto split = make_split_store(make_device_store_with_masters(nullptr, parts),
                                            make_host_store(nullptr, parts, test::small_chunks(parts)), share);
        expect_same(run_steps(*split, param_dtype, gradient_dtype), expected);
      }
      if (HasFailure()) return;
    }
  }
}

TEST(HostStore, GivesTheSameBitsFromFiles) {
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16}) {
    const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
    const auto on_device = make_device_store_with_masters(nullptr, parts);
    const Outcome expected = run_steps(*on_device, param_dtype, DType::kBFloat16);
    for (const std::size_t resident_bytes : {0, 40 * 8192, 1000 * 8192}) {
      const auto paged = test::make_paged_store(nullptr, parts, resident_bytes);
      expect_same(run_steps(*paged, param_dtype, DType::kBFloat16), expected);
      EXPECT_EQ(paged->tier(), Tier::kNvme);
      EXPECT_EQ(paged->swap_stats().written_bytes == 0, resident_bytes == 1000 * 8192);
    }
    for (const double share : {0.0, 0.5}) {
      const auto split = make_split_store(make_device_store_with_masters(nullptr, parts),
                                          test::make_swapping_store(nullptr, parts), share);
      expect_same(run_steps(*split, param_dtype, DType::kBFloat16), expected);
      EXPECT_EQ(split->swap_stats().written_bytes > 0, share > 0);
    }
  }
}

TEST(HostStore, CountsWhatItHoldsAndMapsNoMore) {
  Ledger ledger;
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  const std::size_t numel = (std::size_t{1} << 18) + 64;
  const std::vector<ShardSpec> specs{{numel, DType::kBFloat16, DType::kBFloat16, {{0, numel, 0}}},
                                     {640, DType::kFloat32, DType::kFloat32, {{0, 640, 0}}}};
  {
    const auto store = make_host_store(&ledger, parts, {.chunk_numel = 4096});
    store->reserve(specs);
    EXPECT_EQ(ledger.total(Tier::kHost).current_bytes, 0);
    for (const ShardSpec& spec : specs) store->add_shard(spec, std::vector<float>(spec.numel, 1.0F));
    const auto bytes = [&](Category category) {
      return static_cast<std::size_t>(ledger.entry(Tier::kHost, category).current_bytes);
    };
    for (const Category state : {Category::kMaster, Category::kExpAvg, Category::kExpAvgSq}) {
      EXPECT_EQ(bytes(state), 4 * (numel + 640));
    }
    EXPECT_EQ(bytes(Category::kGradients), 2 * numel + 4 * 640);
    EXPECT_EQ(bytes(Category::kStaging), 3U * 4 * 4096);
    EXPECT_EQ(ledger.total(Tier::kDevice).current_bytes, 0);
    const auto total = static_cast<double>(ledger.total(Tier::kHost).current_bytes);
    EXPECT_LE(static_cast<double>(host_store_bytes(specs, {.chunk_numel = 4096})), 1.01 * total);
  }
  EXPECT_EQ(ledger.total(Tier::kHost).current_bytes, 0);
}

TEST(HostStore, CountsWhatAnUpdateMovesAndNothingBackOfASkippedOne) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  constexpr std::size_t kNumel = 1024;
  const ShardSpec spec{kNumel, DType::kBFloat16, DType::kFloat32, {{0, kNumel, 0}}};
  const std::vector<float> gradient(kNumel, 0.5F);
  for (const double share : {1.0, 0.5}) {
    auto store = test::make_small_host_store(nullptr, parts);
    if (share != 1.0) store = make_split_store(make_device_store_with_masters(nullptr, parts), std::move(store), share);
    store->reserve({&spec, 1});
    store->add_shard(spec, std::vector<float>(kNumel, 1.0F));
    Elements parameters(DType::kBFloat16, kNumel, 0);
    const std::vector<AdamScalars> rows = some_rows(1);
    const auto moved = static_cast<std::uint64_t>(share * kNumel);
    StoreTraffic last = store->traffic();
    for (const StepScalars& step : {kStep, kSkipped}) {
      store->start_update(0, {.gradient = gradient.data(),
                              .parameters = parameters.data(),
                              .rows = rows,
                              .step = &step,
                              .step_on_host = &step});
      const StoreTraffic found = store->traffic();
      EXPECT_EQ(found.to_host_bytes - last.to_host_bytes, moved * sizeof(float));
      EXPECT_EQ(found.to_device_bytes - last.to_device_bytes, step.is_skipped != 0 ? 0 : moved * 2);
      last = found;
      store->wait_update(0, Lane::kCompute);
    }
    EXPECT_GE(store->waited_ms(), 0.0);
  }
}

TEST(HostStore, MoreThanTheHostHasIsAnErrorBeforeAnythingIsTaken) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  const std::vector<ShardSpec> specs{{std::size_t{1} << 33, DType::kBFloat16, DType::kBFloat16, {}}};
  const auto store = make_host_store(nullptr, parts, {.ranks_on_host = 1000});
  try {
    store->reserve(specs);
    FAIL() << "no error";
  } catch (const OutOfMemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("of 1000 ranks, needs 112"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("are missing"), std::string::npos) << error.what();
  }
}

// Rings of which the n-th finds no memory left to lock.
class ScarceLocks final : public test::EmulatedRings {
 public:
  explicit ScarceLocks(int ring_num) : left_(ring_num) {}
  int ring_register(int fd, unsigned what, const void* argument, unsigned num) override {
    if (what == IORING_REGISTER_BUFFERS) no_locked_memory = --left_ == 0;
    return EmulatedRings::ring_register(fd, what, argument, num);
  }

 private:
  int left_;
};

// State and parameters have a ring each, and either may run otherwise than asked for.
TEST(HostStore, TellsWhichRingFellBack) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  for (const int refused : {1, 2, 3}) {
    const test::Folder folder;
    ScarceLocks system(refused);
    HostStoreOptions options = test::small_chunks(parts);
    options.paged = PagedStateOptions{.directories = {folder.path()},
                                      .engine = {.allow_fallback = true, .block_bytes = 4096, .depth = 1},
                                      .direct = false};
    options.parameters = ParameterHome::kFiles;
    options.system = &system;
    const auto store = make_host_store(nullptr, parts, options);
    const std::vector<ShardSpec> specs{{4096, DType::kBFloat16, DType::kFloat32, {{0, 4096, 0}}}};
    store->reserve(specs);
    store->add_shard(specs[0], ordinary_floats(4096, 1));
    const std::vector<std::string> notes = store->swap_stats().notes;
    ASSERT_EQ(notes.size(), refused < 3 ? 1U : 0U);
    if (notes.empty()) continue;
    EXPECT_NE(notes[0].find("plain memory"), std::string::npos) << notes[0];
    EXPECT_EQ(notes[0].starts_with("parameters: "), refused == 2) << notes[0];
  }
}

// An Adam that fails in its n-th call.
class FailingAdam final : public test::HostAdam {
 public:
  explicit FailingAdam(int call_num) : left_(call_num) {}
  void update(Lane, std::span<const AdamRun>, const StepScalars*) override {
    if (--left_ <= 0) throw OutOfMemoryError("the host is full");
  }

 private:
  int left_;
};

TEST(HostStore, AnErrorInTheThreadReachesWhoWaits) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  for (const auto& [call_num, share] : {std::pair{1, 1.0}, {3, 1.0}, {3, 0.5}}) {
    HostStoreOptions options = test::small_chunks(parts);
    options.adam = std::make_shared<FailingAdam>(call_num);
    auto store = make_host_store(nullptr, parts, options);
    if (share < 1.0) store = make_split_store(make_device_store_with_masters(nullptr, parts), std::move(store), share);
    const std::vector<ShardSpec> specs{{1024, DType::kBFloat16, DType::kFloat32, {{0, 1024, 0}}},
                                       {1024, DType::kBFloat16, DType::kFloat32, {{0, 1024, 0}}}};
    store->reserve(specs);
    const std::vector<float> values(1024, 1.0F);
    for (const ShardSpec& spec : specs) store->add_shard(spec, values);
    Elements parameters(DType::kBFloat16, values, 0);
    const std::vector<AdamScalars> rows = some_rows(1);
    for (const std::size_t shard : {0, 1}) {
      store->start_update(shard, {.gradient = values.data(),
                                  .parameters = parameters.data(),
                                  .rows = rows,
                                  .step = &kStep,
                                  .step_on_host = &kStep});
    }
    EXPECT_THROW(store->wait_update(0, Lane::kCompute), OutOfMemoryError);
    EXPECT_THROW(store->wait_update(1, Lane::kCompute), OutOfMemoryError);
    EXPECT_NE(store->failure(), nullptr);  // by which its engine ends those of the peers
    std::vector<float> state(1024);
    EXPECT_THROW(store->read_state(1, StateKind::kMaster, state), OutOfMemoryError);
  }
}

// On a device whose lanes have threads of their own, beside the store's.
TEST(HostStore, WorksAndGoesBesideLanesThatRunLate) {
  for (int round = 0; round < 5; ++round) {
    const auto device = std::make_shared<test::ThreadDevice>();
    const DeviceParts parts{device, make_cpu_adam(1, {})};
    const std::vector<ShardSpec> specs{{4096, DType::kFloat32, DType::kFloat32, {{0, 4096, 0}}},
                                       {512, DType::kFloat32, DType::kFloat32, {{0, 512, 1}}}};
    std::vector<std::vector<float>> parameters{ordinary_floats(4096, 1), ordinary_floats(512, 2)};
    std::vector<std::vector<float>> gradients{ordinary_floats(4096, 3), ordinary_floats(512, 4)};
    const std::vector<AdamScalars> rows = some_rows(1);
    StepScalars scalars{.is_skipped = 1};
    const auto store = make_host_store(nullptr, parts, test::small_chunks(parts));
    store->reserve(specs);
    for (std::size_t i = 0; i < specs.size(); ++i) store->add_shard(specs[i], parameters[i]);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      store->offer_gradient(i, {.data = gradients[i].data(), .ready = device->mark(Lane::kReduce)});
    }
    device->put(Lane::kReduce, [&scalars] { scalars = kStep; });
    const MarkPtr arrived = device->mark(Lane::kReduce);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      store->start_update(i, {.lane = Lane::kReduce,
                              .gradient = gradients[i].data(),
                              .parameters = parameters[i].data(),
                              .rows = rows,
                              .step_on_host = &scalars,
                              .step_arrived = arrived});
    }
    if (round == 0) continue;  // destroyed at once
    std::vector<float> masters(512);
    store->read_state(1, StateKind::kMaster, masters);
    device->synchronize(device->mark(Lane::kCompute));
    EXPECT_NE(masters, ordinary_floats(512, 2));
    store->wait_update(1, Lane::kGather);
    device->synchronize(device->mark(Lane::kGather));
    EXPECT_EQ(parameters[1], masters);
  }
}

// A store of one shard on a simulated device, whose detector finds accesses that nothing orders.
struct SimShard {
  static constexpr std::size_t kNumel = 1024;
  static constexpr std::size_t kBytes = kNumel * sizeof(float);

  explicit SimShard(std::unique_ptr<Store> (*make_store)(Ledger*, const DeviceParts&))
      : store(make_store(nullptr, {device, std::make_shared<test::SimAdam>(device)})) {
    const std::vector<ShardSpec> specs{{kNumel, DType::kFloat32, DType::kFloat32, {{0, kNumel, 0}}}};
    store->reserve(specs);
    store->add_shard(specs[0], {reinterpret_cast<float*>(initial.get()), kNumel});
  }
  void offer() { store->offer_gradient(0, {.data = gradient.get(), .ready = device->mark(Lane::kReduce)}); }
  void start_update(std::byte* updated) {
    store->start_update(0, {.lane = Lane::kReduce,
                            .gradient = gradient.get(),
                            .parameters = updated,
                            .rows = rows,
                            .step_on_host = reinterpret_cast<StepScalars*>(scalars.get())});
  }

  std::shared_ptr<test::SimDevice> device =
      std::make_shared<test::SimDevice>(test::SimSchedule{.policy = test::SimPolicy::kNone});
  std::unique_ptr<Store> store;
  std::shared_ptr<std::byte> initial = device->allocate(kBytes, "initial values");
  std::shared_ptr<std::byte> gradient = device->allocate(kBytes, "a gradient");
  std::shared_ptr<std::byte> parameters = device->allocate(kBytes, "parameters");  // on the device
  std::shared_ptr<std::byte> scalars = device->allocate(sizeof(StepScalars), "scalars");
  std::vector<AdamScalars> rows = some_rows(1);
};

TEST(HostStore, GradientsMayBeWrittenWhenTheyWereDroppedOrUsed) {
  SimShard shard(test::make_small_host_store);
  reinterpret_cast<StepScalars*>(shard.scalars.get())->is_skipped = 1;
  const auto write_and_offer = [&] {
    shard.device->zero(Lane::kReduce, shard.gradient.get(), SimShard::kBytes);
    shard.offer();
  };
  write_and_offer();
  shard.store->drop_gradients(Lane::kReduce);
  write_and_offer();
  shard.start_update(shard.parameters.get());
  shard.store->wait_update(0, Lane::kReduce);
  write_and_offer();
  shard.device->synchronize();
}

// As by an evaluation between a backward and its step, by an update in backward, and by a gather of the last fetch.
TEST(HostStore, WaitsForWhatLanesStillDoWithItsGradientsAndParameters) {
  SimShard shard(test::make_small_host_store);
  test::SimDevice* const device = shard.device.get();
  Store* const store = shard.store.get();
  std::byte* const parameters = shard.parameters.get();
  const auto scratch = device->allocate(SimShard::kBytes, "what a forward computes");
  for (const bool is_offered : {true, false}) {
    device->zero(Lane::kReduce, shard.gradient.get(), SimShard::kBytes);
    if (is_offered) shard.offer();
    device->copy(Lane::kCompute, scratch.get(), parameters, SimShard::kBytes);
    device->wait(Lane::kReduce, device->mark(Lane::kCompute));
    shard.start_update(parameters);
    store->wait_update(0, Lane::kCompute);
    device->wait(Lane::kReduce, device->mark(Lane::kCompute));
    store->fetch_parameters(0, Lane::kCompute, parameters);
    device->copy(Lane::kCompute, scratch.get(), parameters, SimShard::kBytes);
    store->fetch_parameters(0, Lane::kCompute, parameters);
  }
  device->synchronize();
}

// Where the host is the home of parameters, or files are.
TEST(HostStore, ParametersAreUpdatedBehindTheCopiesThatGathersFetch) {
  for (const auto make_store : {test::make_home_store, test::make_swapping_home_store}) {
    SimShard shard(make_store);
    const auto fetched = shard.device->allocate(SimShard::kBytes, "a staging shard");
    for (int step = 0; step < 2; ++step) {
      shard.store->fetch_parameters(0, Lane::kGather, fetched.get());
      shard.offer();
      shard.start_update(nullptr);
      shard.store->wait_update(0, Lane::kGather);
    }
    shard.device->synchronize();
  }
}

// In memory and in files, beside trained ones and alone.
TEST(HostStore, KeepsFrozenParametersWithoutState) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  for (const bool in_files : {false, true}) {
    for (const bool alone : {false, true}) {
      Ledger ledger;
      const auto make_store = in_files ? test::make_swapping_home_store : test::make_home_store;
      const auto store = make_store(&ledger, parts);
      ASSERT_TRUE(store->keeps_frozen());
      std::vector<ShardSpec> specs = specs_of(DType::kBFloat16, DType::kFloat32);
      for (std::size_t i = 0; i < specs.size(); ++i) specs[i].is_frozen = alone || i % 2 == 0;
      store->reserve(specs);
      std::size_t trained_numel = 0;
      for (std::size_t i = 0; i < specs.size(); ++i) {
        store->add_shard(specs[i], ordinary_floats(specs[i].numel, static_cast<std::uint32_t>(i)));
        if (!specs[i].is_frozen) trained_numel += specs[i].numel;
      }
      for (const std::uint32_t seed : {0U, 50U}) {
        for (std::size_t i = 0; i < specs.size(); ++i) {
          const std::vector<float> values = ordinary_floats(specs[i].numel, static_cast<std::uint32_t>(i) + seed);
          if (seed > 0) store->write_state(i, StateKind::kMaster, values);
          const Elements expected(DType::kBFloat16, values, 0);
          Elements found(DType::kBFloat16, std::vector<float>(specs[i].numel), 0);
          store->fetch_parameters(i, Lane::kGather, found.data());
          EXPECT_EQ(found.first_difference(expected), -1) << i;
        }
      }
      std::vector<float> state(specs[0].numel);
      EXPECT_THROW(store->read_state(0, StateKind::kMaster, state), StateError);
      for (const Category category : {Category::kMaster, Category::kExpAvg, Category::kExpAvgSq}) {
        const auto bytes_in = [&](Tier tier) { return ledger.entry(tier, category).current_bytes; };
        EXPECT_EQ(bytes_in(Tier::kHost) + bytes_in(Tier::kNvme), 4 * trained_numel);
      }
    }
  }
}

TEST(HostStore, RejectsWhatCannotBe) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  EXPECT_THROW(make_host_store(nullptr, parts, {.chunk_numel = 0}), ArgumentError);
  EXPECT_THROW(make_host_store(nullptr, parts, {.chunk_numel = 65}), ArgumentError);
  EXPECT_THROW(make_split_store(nullptr, nullptr, 1.5), ArgumentError);
  const auto store = make_host_store(nullptr, parts, test::small_chunks(parts));
  const std::vector<ShardSpec> specs{{128, DType::kBFloat16, DType::kBFloat16, {{0, 128, 1}}}};
  const std::vector<float> initial(128, 1.0F);
  EXPECT_THROW(store->add_shard(specs[0], initial), StateError);
  store->reserve(specs);
  EXPECT_THROW(store->add_shard(specs[0], std::span(initial).first(3)), ArgumentError);
  store->add_shard(specs[0], initial);
  EXPECT_THROW(store->offer_gradient(0, {.data = initial.data(), .dtype = DType::kFloat32}), ArgumentError);
  EXPECT_THROW(store->wait_update(1, Lane::kCompute), ArgumentError);
  std::vector<float> values(5);
  EXPECT_THROW(store->read_state(0, StateKind::kMaster, values), ArgumentError);
  EXPECT_THROW(store->start_update(0, {}), ArgumentError);
}

}  // namespace
}  // namespace zb
