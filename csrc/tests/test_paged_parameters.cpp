// Paged parameters against a model in memory: values through many steps, what a budget keeps, what is read ahead, and
// disks that fail.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "io_support.h"
#include "kernels/cpu_device.h"
#include "memory/host_buffer.h"
#include "sim/sim_device.h"
#include "stores/paged_parameters.h"

namespace zb {
namespace {

using test::EmulatedRings;
using test::error_text;
using test::FaultySystem;
using test::Folder;

constexpr std::size_t kChunkNumel = 2048;  // a page of bf16

class Parameters {
 public:
  Parameters(std::vector<ParameterShard> shards, const PagedStateOptions& options, Ledger* ledger = nullptr,
             System& system = kernel_system())
      : shards_(std::move(shards)),
        device_(make_cpu_device()),
        memory_(paged_parameters_bytes(shards_, kChunkNumel, options), "a test") {
    pages_ = std::make_unique<PagedParameters>(shards_, kChunkNumel, options,
                                               std::span(memory_.data(), memory_.bytes()), device_, ledger, system);
    for (const ParameterShard& shard : shards_) model_.emplace_back(shard.numel * dtype_bytes(shard.dtype));
    for (std::size_t shard = 0; shard < shards_.size(); ++shard) write(shard, 0);
  }
  PagedParameters* operator->() { return pages_.get(); }

  bool waits_for_writes = false;  // else what updates leave in memory depends on how long writes take

  void write(std::size_t shard, unsigned seed) {
    pages_->release(shard);
    for (std::size_t begin = 0; begin < shards_[shard].numel; begin += kChunkNumel) {
      const std::size_t element_bytes = dtype_bytes(shards_[shard].dtype);
      const std::size_t bytes = std::min(kChunkNumel, shards_[shard].numel - begin) * element_bytes;
      const std::span<std::byte> values{model_[shard].data() + begin * element_bytes, bytes};
      test::fill_random(values, seed * 1000003U + shard * 1009U + begin);
      pages_->write(shard, begin, [&](std::byte* chunk) { std::memcpy(chunk, values.data(), bytes); });
      if (waits_for_writes) pages_->flush();
    }
  }
  void update(std::size_t shard, unsigned seed) {
    pages_->begin_update(shard);
    write(shard, seed);
  }
  void fetch(std::size_t shard) {
    std::vector<std::byte> found(model_[shard].size());
    pages_->fetch(shard, [&](std::size_t offset_bytes, std::span<const std::byte> chunk) {
      std::memcpy(found.data() + offset_bytes, chunk.data(), chunk.size());
      return device_->mark(Lane::kGather);
    });
    EXPECT_EQ(found, model_[shard]) << "shard " << shard;
  }
  // Forward, backward, updates in the order of the next forward.
  void step(unsigned number) {
    for (std::size_t shard = 0; shard < shards_.size(); ++shard) fetch(shard);
    for (std::size_t shard = shards_.size(); shard-- > 0;) fetch(shard);
    for (std::size_t shard = 0; shard < shards_.size(); ++shard) update(shard, number);
  }

 private:
  std::vector<ParameterShard> shards_;
  std::shared_ptr<Device> device_;
  HostBuffer memory_;
  std::vector<std::vector<std::byte>> model_;
  std::unique_ptr<PagedParameters> pages_;
};

PagedStateOptions options_in(const Folder& folder, std::size_t resident_bytes = 0) {
  return {.directories = {folder.path()},
          .engine = {.allow_fallback = true, .block_bytes = 4096, .depth = 2},
          .resident_bytes = resident_bytes};
}

std::vector<ParameterShard> equal_shards(std::size_t num, std::size_t numel = 2 * kChunkNumel) {
  return std::vector<ParameterShard>(num, {.numel = numel, .dtype = DType::kBFloat16});
}

// In a lane that runs only when somebody waits for it.
TEST(PagedParameters, FramesAreUsedAgainBehindTheCopiesFromThem) {
  const Folder folder;
  constexpr std::size_t kChunkNum = 24;  // more than there are frames
  const std::vector<ParameterShard> shards = equal_shards(1, kChunkNum * kChunkNumel);
  const PagedStateOptions options = options_in(folder);
  const auto device = std::make_shared<test::SimDevice>(test::SimSchedule{.policy = test::SimPolicy::kNone});
  const HostBuffer memory(paged_parameters_bytes(shards, kChunkNumel, options), "a test");
  PagedParameters pages(shards, kChunkNumel, options, {memory.data(), memory.bytes()}, device, nullptr,
                        kernel_system());
  std::vector<std::byte> found;  // the first byte of every chunk
  std::vector<std::byte> expected;
  found.reserve(3 * kChunkNum);
  for (const int round : {0, 1, 2}) {
    pages.release(0);
    for (std::size_t chunk = 0; chunk < kChunkNum; ++chunk) {
      const auto value = static_cast<std::byte>(100 * round + static_cast<int>(chunk));
      pages.write(0, chunk * kChunkNumel, [&](std::byte* data) { std::memset(data, static_cast<int>(value), 4096); });
      expected.push_back(value);
    }
    pages.fetch(0, [&](std::size_t, std::span<const std::byte> chunk) {
      device->put_in(Lane::kGather, "copy", {}, [&found, chunk] { found.push_back(chunk[0]); });
      return device->mark_for_host(Lane::kGather);
    });
  }
  device->synchronize();
  EXPECT_EQ(found, expected);
}

// Steps as an engine makes them, in orders that change, over rings whose transfers are short, late and interrupted.
TEST(PagedParameters, HoldWhatAModelHolds) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const Folder folder;
    std::vector<ParameterShard> shards;
    for (std::size_t i = 0; i < 3 + random() % 8; ++i) {
      shards.push_back({random() % 5000, random() % 3 == 0 ? DType::kFloat32 : DType::kBFloat16});
    }
    EmulatedRings emulated(seed);
    const auto mutex = std::make_shared<std::mutex>();
    emulated.transfer_fault = [mutex, draw = std::mt19937(seed)](Direction, std::uint64_t, std::size_t) mutable {
      const std::lock_guard lock(*mutex);
      return draw() % 4 == 0 ? static_cast<ssize_t>(4096) : ssize_t{draw() % 9 == 0 ? -EINTR : 0};
    };
    PagedStateOptions options = options_in(folder, seed % 3 * 20000);
    options.checksums = seed % 2 == 0;
    if (seed % 4 == 3) options.engine.kind = IoEngineKind::kThreads;
    Parameters parameters(shards, options, nullptr, emulated);
    for (unsigned number = 1; number < 8; ++number) {
      for (int fetch_num = number % 3 == 0 ? 10 : 0; fetch_num > 0; --fetch_num) {
        parameters.fetch(random() % shards.size());
      }
      parameters.step(number);
      if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
    }
  }
}

TEST(PagedParameters, AStepReadsForForwardAndBackwardAndWritesOnce) {
  const Folder folder;
  const std::size_t num = 20;
  Parameters parameters(equal_shards(num), options_in(folder));
  for (unsigned number = 1; number < 4; ++number) parameters.step(number);
  const PagerStats before = parameters->stats();
  parameters.step(4);
  const PagerStats after = parameters->stats();
  const std::uint64_t all_bytes = num * 2 * kChunkNumel * 2;
  EXPECT_EQ(after.written_bytes - before.written_bytes, all_bytes);
  // What is in memory at the turns, from forward to backward and from backward to forward, is not read again.
  EXPECT_LE(after.read_bytes - before.read_bytes, 2 * all_bytes);
  EXPECT_GT(after.read_bytes - before.read_bytes, all_bytes);
}

// No update tells when a pass ends: forwards alone, or forwards and backwards towards inputs.
TEST(PagedParameters, FrozenOnesAreReadAheadInTheOrderOfTheirPasses) {
  for (const bool goes_back : {false, true}) {
    const Folder folder;
    PagedStateOptions options = options_in(folder);
    options.engine.depth = 1;
    std::vector<ParameterShard> shards = equal_shards(20, kChunkNumel);
    for (ParameterShard& shard : shards) shard.is_frozen = true;
    Parameters parameters(shards, options);
    const auto pass = [&] {
      for (std::size_t shard = 0; shard < 20; ++shard) parameters.fetch(shard);
      for (std::size_t shard = goes_back ? 20 : 0; shard-- > 0;) parameters.fetch(shard);
    };
    for (int number = 0; number < 4; ++number) pass();
    parameters->flush();
    EXPECT_TRUE(parameters->is_read(0));
    EXPECT_TRUE(parameters->is_read(1));
    const std::uint64_t before = parameters->stats().read_bytes;
    pass();
    parameters->flush();
    const std::uint64_t all_bytes = 20 * kChunkNumel * 2;
    EXPECT_LE(parameters->stats().read_bytes - before, (goes_back ? 2 : 1) * all_bytes);
  }
}

TEST(PagedParameters, TheNextChunksComeWithoutACall) {
  const Folder folder;
  PagedStateOptions options = options_in(folder);
  options.engine.depth = 1;
  Parameters parameters(equal_shards(20, kChunkNumel), options);
  for (unsigned number = 1; number < 4; ++number) parameters.step(number);
  for (std::size_t shard = 0; shard < 20; ++shard) parameters.fetch(shard);
  for (std::size_t shard = 20; shard-- > 0;) parameters.fetch(shard);
  // No write may be under way where a frame is chosen, or a chunk further on stays in one whose turn it was.
  for (std::size_t shard = 0; shard < 20; ++shard) {
    parameters.update(shard, 4);
    parameters->flush();
  }
  for (std::size_t shard = 0; shard < 10; ++shard) {
    parameters.fetch(shard);
    parameters->flush();
  }
  // Of six frames two are read ahead into, two hold what was fetched last and two are for updates.
  const double before_s = parameters->stats().wait_s;
  for (std::size_t shard = 10; shard < 13; ++shard) EXPECT_EQ(parameters->is_read(shard), shard < 12) << shard;
  parameters.fetch(10);
  parameters.fetch(11);
  EXPECT_EQ(parameters->stats().wait_s, before_s);
}

// A shard of many chunks, when there is memory for it, comes while the one before is used: nothing of it is read by its
// fetch. What does not fit ahead is left to the fetch.
TEST(PagedParameters, AWholeShardIsReadAheadOfItsFetch) {
  constexpr std::size_t kChunkNum = 9;
  const std::vector<ParameterShard> shards = equal_shards(8, kChunkNum * kChunkNumel);
  for (const bool has_memory : {false, true}) {
    const Folder folder;
    PagedStateOptions options = options_in(folder);
    options.engine.depth = 1;
    if (has_memory) options.ahead_bytes = largest_paged_shard_bytes(shards, kChunkNumel, options);
    Parameters parameters(shards, options);
    parameters.waits_for_writes = true;
    for (unsigned number = 1; number < 4; ++number) parameters.step(number);
    for (std::size_t shard = 0; shard < 5; ++shard) {
      parameters.fetch(shard);
      parameters->flush();
      EXPECT_TRUE(parameters->is_read(shard + 1)) << "all of it that is read ahead";
      EXPECT_FALSE(parameters->is_read(shard + 2));
    }
    const double before_s = parameters->stats().wait_s;
    parameters.fetch(5);
    if (has_memory) {
      EXPECT_EQ(parameters->stats().wait_s, before_s);
    }
  }
}

TEST(PagedParameters, ABudgetKeepsThemInMemory) {
  const std::size_t most_bytes = [] {
    const Folder folder;
    return most_paged_parameters_bytes(equal_shards(20), kChunkNumel, options_in(folder));
  }();
  for (const bool all : {false, true}) {
    const Folder folder;
    Ledger ledger;
    Parameters parameters(equal_shards(20), options_in(folder, all ? most_bytes : most_bytes / 2), &ledger);
    parameters.step(1);
    parameters.step(2);
    const std::int64_t swapped = ledger.entry(Tier::kNvme, Category::kParameters).current_bytes;
    EXPECT_EQ(swapped, all ? 0 : 20 * kChunkNumel * 2);
    EXPECT_EQ(parameters->stats().written_bytes == 0, all);
  }
}

TEST(PagedParameters, FilesAreCountedAndGoWithThem) {
  const Folder folder;
  Ledger ledger;
  {
    Parameters parameters(equal_shards(20), options_in(folder), &ledger);
    EXPECT_EQ(ledger.entry(Tier::kNvme, Category::kParameters).current_bytes, 20 * 2 * kChunkNumel * 2);
    EXPECT_EQ(folder.file_num(), 1U);
  }
  EXPECT_EQ(ledger.total(Tier::kNvme).current_bytes, 0);
  EXPECT_EQ(folder.file_num(), 0U);
}

TEST(PagedParameters, AFailedDiskIsAnErrorOfEveryLaterCall) {
  const Folder folder;
  FaultySystem system;
  std::atomic<bool> bad{false};
  system.transfer_fault = [&](Direction, std::uint64_t, std::size_t) -> ssize_t { return bad ? -EIO : 0; };
  PagedStateOptions options = options_in(folder);
  options.engine.kind = IoEngineKind::kThreads;
  Parameters parameters(equal_shards(20), options, nullptr, system);
  parameters.step(1);
  bad = true;
  EXPECT_THROW(parameters.step(2), IoError);
  bad = false;
  EXPECT_THROW(parameters.fetch(0), IoError);
  EXPECT_THROW(parameters.update(0, 3), IoError);
  options.directories = {folder.path() + "/nowhere"};
  EXPECT_NE(error_text([&] { Parameters(equal_shards(20), options); }).find("nowhere"), std::string::npos);
  options.directories.clear();
  EXPECT_THROW(Parameters(equal_shards(20), options), ArgumentError);
}

TEST(PagedParameters, ACorruptedChunkIsFoundByItsChecksum) {
  const Folder folder;
  PagedStateOptions options = options_in(folder);
  options.checksums = true;
  Parameters parameters(equal_shards(20), options);
  parameters.step(1);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const int fd = ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    for (off_t offset = 0; offset < static_cast<off_t>(entry.file_size()); offset += 4096) {
      ASSERT_EQ(::pwrite(fd, "spoilt", 6, offset), 6);
    }
    ::close(fd);
  }
  EXPECT_NE(error_text([&] { parameters.step(2); }).find("corrupted"), std::string::npos);
}

}  // namespace
}  // namespace zb
