// [Note: size of chunks]: what is chosen, and that no bit depends on it.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>

#include "common/error.h"
#include "float_support.h"
#include "host_stores.h"
#include "io_support.h"
#include "kernels/cpu_device.h"
#include "stores/host_store_memory.h"

namespace zb {
namespace {

using test::Elements;
using test::ordinary_floats;

constexpr std::size_t kMib = std::size_t{1} << 20;

// As a rank has it by default: io_uring with 32 requests of 1 MiB.
HostStoreOptions files(std::optional<std::size_t> memory_bytes, ParameterHome parameters = ParameterHome::kDevice) {
  HostStoreOptions options;
  options.parameters = parameters;
  options.paged = PagedStateOptions{.directories = {"/nowhere"}, .engine = {.block_bytes = kMib, .depth = 32}};
  options.memory_bytes = memory_bytes;
  return options;
}

std::vector<ShardSpec> equal_shards(std::size_t num, std::size_t numel) {
  return std::vector<ShardSpec>(num, {numel, DType::kBFloat16, DType::kBFloat16, {}});
}

std::size_t chosen(std::span<const ShardSpec> shards, HostStoreOptions options) {
  spend_host_memory(shards, options);
  return options.chunk_numel.value();
}

TEST(ChunkSize, IsTheLargestWhereNoBudgetIsShort) {
  const std::vector<ShardSpec> shards = equal_shards(12, 50 * kMib);
  EXPECT_EQ(chosen(shards, {}), kChunkNumel);
  EXPECT_EQ(chosen(shards, files(std::nullopt)), kChunkNumel);
  EXPECT_EQ(chosen(shards, files(4096 * kMib)), kChunkNumel);
  EXPECT_EQ(chosen(shards, files(16384 * kMib)), kChunkNumel);  // all of the state
  EXPECT_EQ(chosen(shards, files(16384 * kMib, ParameterHome::kFiles)), kChunkNumel);
}

TEST(ChunkSize, IsWhatWasAskedFor) {
  HostStoreOptions options = files(4096 * kMib);
  options.chunk_numel = 64;
  EXPECT_EQ(chosen(equal_shards(2, kMib), options), 64);
  EXPECT_EQ(chunk_numel_of({}), kChunkNumel);
}

// Half a GiB for two ranks of a model of 60 M parameters: buffers of the largest chunks alone take 230 MiB.
TEST(ChunkSize, ShrinksBuffersThatABudgetDoesNotHold) {
  const std::vector<ShardSpec> shards = equal_shards(8, 15 * kMib / 4);
  HostStoreOptions options = files(256 * kMib);
  options.chunk_numel = kChunkNumel;
  EXPECT_THROW(spend_host_memory(shards, options), OutOfMemoryError);
  const std::size_t numel = chosen(shards, files(256 * kMib));
  EXPECT_LT(numel, kChunkNumel);
  EXPECT_GE(numel, 128U * 1024);
}

TEST(ChunkSize, TheLeastGivesEveryPathItsBytes) {
  const std::vector<ShardSpec> shards = equal_shards(1, 64 * kMib);
  for (const std::size_t path_num : {1, 2, 5}) {
    for (const std::size_t path_bytes : {std::size_t{4096}, kMib, 16 * kMib}) {
      for (const ParameterHome home : {ParameterHome::kDevice, ParameterHome::kFiles}) {
        HostStoreOptions options = files(0, home);
        options.paged->directories.resize(path_num, "/nowhere");
        const std::size_t least = least_chunk_numel(shards, options, path_bytes);
        const std::size_t element_bytes = home == ParameterHome::kFiles ? 2 : 12;
        EXPECT_TRUE(least == kChunkNumel || least * element_bytes >= path_num * path_bytes);
        EXPECT_TRUE(least == 64 || least / 2 * element_bytes < path_num * path_bytes);
        EXPECT_EQ(least % 64, 0U);
      }
    }
  }
}

// What is in flight takes 128 MiB, of state and of parameters; frames beside it are the smaller the smaller chunks are.
TEST(ChunkSize, CutsRequestsOnlyWhereNothingElseFits) {
  const std::vector<ShardSpec> shards = equal_shards(4, 8 * kMib);
  const std::size_t gradient_bytes = 4 * 16 * kMib;
  const HostStoreOptions whole = files(gradient_bytes + 180 * kMib, ParameterHome::kFiles);
  const HostStoreOptions cut = files(gradient_bytes + 140 * kMib, ParameterHome::kFiles);
  const std::size_t request_numel = least_chunk_numel(shards, whole, kMib);
  EXPECT_GE(chosen(shards, whole), request_numel);
  EXPECT_LT(chosen(shards, cut), request_numel);
}

TEST(ChunkSize, ABudgetThatHoldsNoBuffersIsAnErrorThatNamesCures) {
  const std::vector<ShardSpec> shards = equal_shards(2, 64 * kMib);
  HostStoreOptions given = files(100 * kMib);
  given.chunk_numel = kChunkNumel;
  for (const HostStoreOptions& options : {files(100 * kMib), given}) {
    HostStoreOptions spent = options;
    try {
      spend_host_memory(shards, spent);
      FAIL() << "no error";
    } catch (const OutOfMemoryError& error) {
      const std::string text = error.what();
      for (const char* cure : {"host_memory_bytes", "--host-memory-gib", "io_depth", "more ranks"}) {
        EXPECT_NE(text.find(cure), std::string::npos) << text;
      }
      EXPECT_EQ(text.find("leave out chunk_numel") != std::string::npos, options.chunk_numel.has_value()) << text;
    }
  }
}

// Of random shards, settings and budgets: the largest of those that fit and move nearly as little as any, of whole
// requests where one of those fits.
TEST(ChunkSize, FitsAndKeepsInMemoryNearlyWhatAnySizeWould) {
  std::mt19937 generator(1);
  const auto between = [&](std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(generator);
  };
  std::size_t failed_num = 0;
  std::size_t shrunk_num = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<ShardSpec> shards;
    for (std::size_t shard = between(1, 8); shard > 0; --shard) {
      const DType dtype = between(0, 1) == 0 ? DType::kBFloat16 : DType::kFloat32;
      shards.push_back({64 * between(0, between(0, 1) == 0 ? 100 : 20000), dtype, DType::kBFloat16, {}});
    }
    HostStoreOptions options =
        files(between(0, 60 * kMib), between(0, 2) == 0 ? ParameterHome::kFiles : ParameterHome::kDevice);
    options.paged->directories.resize(between(1, 3), "/nowhere");
    options.paged->engine.block_bytes = std::size_t{4096} << between(0, 5);
    options.paged->engine.depth = between(1, 32);

    const std::size_t request_numel = least_chunk_numel(shards, options, options.paged->engine.block_bytes);
    std::map<std::size_t, std::size_t, std::greater<>> traffic_bytes;  // by size of chunks that fit
    for (std::size_t numel = kChunkNumel; numel >= least_chunk_numel(shards, options, 4096); numel /= 2) {
      if (numel < request_numel && !traffic_bytes.empty()) break;
      HostStoreOptions tried = options;
      tried.chunk_numel = numel;
      try {
        spend_host_memory(shards, tried);
        traffic_bytes[numel] = swap_traffic_bytes(shards, tried);
      } catch (const OutOfMemoryError&) {
      }
    }
    if (traffic_bytes.empty()) {
      ++failed_num;
      EXPECT_THROW(chosen(shards, options), OutOfMemoryError);
      continue;
    }
    HostStoreOptions spent = options;
    spend_host_memory(shards, spent);
    EXPECT_LE(host_store_bytes(shards, spent), *options.memory_bytes);
    shrunk_num += *spent.chunk_numel < kChunkNumel ? 1 : 0;
    std::size_t whole_bytes = 0;
    for (const ShardSpec& spec : shards) {
      const std::size_t parameter_bytes =
          options.parameters == ParameterHome::kFiles ? 3 * dtype_bytes(spec.param_dtype) : 0;
      whole_bytes += (2 * 12 + parameter_bytes) * spec.numel;
    }
    const std::size_t best_bytes =
        std::ranges::min_element(traffic_bytes, {}, [](const auto& choice) { return choice.second; })->second;
    const auto expected = std::ranges::find_if(
        traffic_bytes, [&](const auto& choice) { return choice.second <= best_bytes + whole_bytes / 20; });
    EXPECT_EQ(*spent.chunk_numel, expected->first);
  }
  EXPECT_GT(failed_num, 10U);
  EXPECT_GT(shrunk_num, 10U);
}

// Parameters and states after three steps of a store that has this size of chunks.
std::vector<std::vector<float>> end_of(const HostStoreOptions& options, std::size_t numel,
                                       const std::vector<Segment>& segments) {
  const DeviceParts parts{make_cpu_device(), make_cpu_adam(1, {})};
  const auto store = make_host_store(nullptr, parts, options);
  const ShardSpec spec{numel, DType::kBFloat16, DType::kBFloat16, segments};
  store->reserve({&spec, 1});
  const std::vector<float> initial = ordinary_floats(numel, 1);
  store->add_shard(spec, initial);
  Elements parameters(DType::kBFloat16, initial, 0);
  const StepScalars step{.norm = 1.0, .factor = 0.5F, .is_skipped = 0};
  for (long number = 1; number <= 3; ++number) {
    const Elements gradient(DType::kBFloat16, ordinary_floats(numel, static_cast<std::uint32_t>(7 * number)), 0);
    const std::vector<AdamScalars> rows{make_adam_scalars({.lr = 1e-2, .weight_decay = 0.1}, number, 0.0F)};
    store->start_update(0, {.gradient = gradient.data(),
                            .gradient_dtype = DType::kBFloat16,
                            .parameters = options.parameters == ParameterHome::kDevice ? parameters.data() : nullptr,
                            .rows = rows,
                            .step = &step,
                            .step_on_host = &step});
    store->wait_update(0, Lane::kCompute);
  }
  if (options.parameters != ParameterHome::kDevice) store->fetch_parameters(0, Lane::kCompute, parameters.data());
  std::vector<std::vector<float>> end(1);
  for (std::size_t i = 0; i < numel; ++i) end[0].push_back(parameters.get(i));
  for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
    end.emplace_back(numel);
    store->read_state(0, kind, end.back());
  }
  return end;
}

TEST(ChunkSize, ChangesNoBit) {
  std::mt19937 generator(2);
  const auto between = [&](std::size_t low, std::size_t high) {
    return std::uniform_int_distribution<std::size_t>(low, high)(generator);
  };
  for (int round = 0; round < 20; ++round) {
    const std::size_t numel = between(1, 5000);
    std::vector<Segment> segments;
    for (std::size_t begin = between(0, 50); begin < numel; begin += between(0, 3)) {
      const std::size_t end = std::min(numel, begin + between(1, 1500));
      segments.push_back({begin, end, 0});
      begin = end;
    }
    const auto expected = end_of({}, numel, segments);
    for (const ParameterHome home : {ParameterHome::kDevice, ParameterHome::kHost, ParameterHome::kFiles}) {
      const test::Folder folder;
      HostStoreOptions options;
      options.parameters = home;
      options.chunk_numel = 64 * between(1, 80);
      if (home == ParameterHome::kFiles || between(0, 1) == 0) {
        options.paged = PagedStateOptions{.directories = {folder.path()},
                                          .engine = {.allow_fallback = true, .block_bytes = 4096, .depth = 1},
                                          .checksums = true};
      }
      EXPECT_EQ(end_of(options, numel, segments), expected) << numel << " in chunks of " << *options.chunk_numel;
    }
  }
}

}  // namespace
}  // namespace zb
