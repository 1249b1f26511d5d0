// Paged state against a model in memory: values, what swaps under a budget, the order it learns, what it counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>

#include "common/error.h"
#include "io_support.h"
#include "memory/host_buffer.h"
#include "stores/paged_state.h"

namespace zb {
namespace {

using test::error_text;
using test::FaultySystem;
using test::Folder;

constexpr std::size_t kChunkNumel = 1000;

class State {
 public:
  State(std::vector<std::size_t> numels, const PagedStateOptions& options, Ledger* ledger = nullptr,
        System& system = kernel_system())
      : numels_(std::move(numels)),
        memory_(paged_state_bytes(numels_, kChunkNumel, options), "a test"),
        state_(make_paged_state(numels_, kChunkNumel, options, {memory_.data(), memory_.bytes()}, ledger, system)) {
    for (const std::size_t numel : numels_) state_->add_shard(numel);
  }
  PagedState* operator->() { return state_.get(); }

  // Every chunk of these shards in order: each state's values checked, then made new from the step's number.
  void step(const std::vector<std::size_t>& shards, int number) {
    for (const std::size_t shard : shards) {
      for (std::size_t begin = 0; begin < numels_[shard]; begin += kChunkNumel) {
        const std::size_t end = std::min(begin + kChunkNumel, numels_[shard]);
        const StateChunk chunk = state_->borrow(shard, begin, end);
        for (std::size_t i = begin; i < end; ++i) {
          ASSERT_EQ(chunk.master[i - begin], value(number - 1, shard, i, 0)) << shard << " " << i;
          ASSERT_EQ(chunk.exp_avg[i - begin], value(number - 1, shard, i, 1));
          ASSERT_EQ(chunk.exp_avg_sq[i - begin], value(number - 1, shard, i, 2));
          chunk.master[i - begin] = value(number, shard, i, 0);
          chunk.exp_avg[i - begin] = value(number, shard, i, 1);
          chunk.exp_avg_sq[i - begin] = value(number, shard, i, 2);
        }
        state_->give_back(shard, begin, end, ChunkUse::kWritten);
      }
    }
  }

 private:
  static float value(int number, std::size_t shard, std::size_t index, int state) {
    if (number == 0) return 0.0F;
    return static_cast<float>(number * 7 + state) + static_cast<float>(shard) * 0.25F + static_cast<float>(index) * 2;
  }

  std::vector<std::size_t> numels_;
  HostBuffer memory_;
  std::unique_ptr<PagedState> state_;
};

PagedStateOptions options_in(const Folder& folder, std::size_t resident_bytes = 0) {
  return {.directories = {folder.path()},
          .engine = {.allow_fallback = true, .block_bytes = 4096, .depth = 2},
          .resident_bytes = resident_bytes};
}

TEST(PagedState, KeepsEveryValueWhateverTheOrder) {
  const std::vector<std::size_t> numels{2500, 1, 0, 1000, 9000, 4096, 700};
  std::mt19937 random(2);
  for (const std::size_t resident_bytes : {0, 60000, 1000000}) {
    const Folder folder;
    PagedStateOptions options = options_in(folder, resident_bytes);
    options.directories.push_back(folder.path());
    options.checksums = true;
    State state(numels, options);
    std::vector<std::size_t> order(numels.size());
    std::iota(order.begin(), order.end(), 0);
    for (int number = 1; number < 12; ++number) {
      if (number % 4 == 0) std::shuffle(order.begin(), order.end(), random);
      state.step(order, number);
      if (testing::Test::HasFatalFailure()) return;
    }
    EXPECT_EQ(state->stats().written_bytes == 0, resident_bytes == 1000000);
  }
}

TEST(PagedState, ABudgetOfHalfTheStateHalvesTheTransfers) {
  const std::vector<std::size_t> numels(20, kChunkNumel);
  std::uint64_t written[2];
  for (const bool half : {false, true}) {
    const Folder folder;
    State state(numels, options_in(folder, half ? 10 * 12288 : 0));
    std::vector<std::size_t> order(20);
    std::iota(order.begin(), order.end(), 0);
    state.step(order, 1);
    const std::uint64_t before = state->stats().written_bytes;
    state.step(order, 2);
    written[half ? 1 : 0] = state->stats().written_bytes - before;
    EXPECT_EQ(state->swapped_bytes(), (half ? 10 : 20) * kChunkNumel * 12);
  }
  EXPECT_EQ(written[0], 20U * 12288);
  EXPECT_EQ(written[1], 10U * 12288);
}

TEST(PagedState, LearnsAnOrderAndReadsAheadByIt) {
  const Folder folder;
  std::atomic<int> reads{0};
  FaultySystem system;
  system.transfer_fault = [&](Direction direction, std::uint64_t, std::size_t) -> ssize_t {
    reads += direction == Direction::kRead ? 1 : 0;
    return 0;
  };
  PagedStateOptions options = options_in(folder);
  options.engine = {.kind = IoEngineKind::kThreads, .block_bytes = 4096, .depth = 1};
  State state(std::vector<std::size_t>(12, kChunkNumel), options, nullptr, system);
  const std::vector<std::size_t> backward{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
  for (int number = 1; number < 4; ++number) state.step(backward, number);
  const int per_step = 12 * 3;  // chunks of three blocks
  // The first chunks of the next step come without a call.
  for (int i = 0; i < 5000 && reads <= 2 * per_step; ++i) usleep(1000);
  EXPECT_GT(reads, 2 * per_step);
  EXPECT_LE(reads, 2 * per_step + 4 * 3);
}

TEST(PagedState, CountsWhatLiesInFilesAndLeavesNone) {
  Ledger ledger;
  const Folder folder;
  {
    State state({5000}, options_in(folder), &ledger);
    EXPECT_EQ(ledger.entry(Tier::kNvme, Category::kExpAvgSq).current_bytes, 5000 * 4);
    EXPECT_EQ(ledger.total(Tier::kNvme).current_bytes, 5 * 12288) << "with the ends of slots";
    EXPECT_EQ(ledger.total(Tier::kHost).current_bytes, 4 * 12288) << "frames, and no more";
    ASSERT_EQ(folder.file_num(), 1U);
    EXPECT_EQ(std::filesystem::file_size(*std::filesystem::directory_iterator(folder.path())), 5U * 12288);
  }
  EXPECT_EQ(ledger.total(Tier::kNvme).current_bytes, 0);
  EXPECT_EQ(ledger.total(Tier::kHost).current_bytes, 0);
  EXPECT_EQ(folder.file_num(), 0U);
}

TEST(PagedState, WrongUseAndFailedDisksAreErrors) {
  const Folder folder;
  FaultySystem system;
  std::atomic<bool> bad{false};
  system.transfer_fault = [&](Direction, std::uint64_t, std::size_t) -> ssize_t { return bad ? -EIO : 0; };
  PagedStateOptions options = options_in(folder);
  options.engine.kind = IoEngineKind::kThreads;
  State state({12000}, options, nullptr, system);
  EXPECT_THROW(state->add_shard(10), StateError);
  EXPECT_THROW(state->borrow(0, 10, 1010), ArgumentError);
  EXPECT_THROW(state->borrow(1, 0, 1000), ArgumentError);
  bad = true;
  EXPECT_THROW(state.step({0}, 1), IoError);
  options.directories = {folder.path() + "/nowhere"};
  EXPECT_NE(error_text([&] { State({10}, options); }).find("nowhere"), std::string::npos);
  options.directories.clear();
  EXPECT_THROW(State({10}, options), ArgumentError);
}

}  // namespace
}  // namespace zb
