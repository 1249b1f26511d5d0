// What shared buffers take beyond what was asked for stands in the ledger, in every state and at every peak.
#include "comm/memory_overhead.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>

namespace zb {
namespace {

std::shared_ptr<std::byte> memory_of(std::size_t bytes) {
  return {new std::byte[bytes], [](std::byte* data) { delete[] data; }};
}

class MemoryOverheadTest : public testing::Test {
 protected:
  std::int64_t now() const { return ledger_.entry(Tier::kDevice, Category::kCommunicators).current_bytes; }
  std::int64_t peak() const { return ledger_.entry(Tier::kDevice, Category::kCommunicators).peak_bytes; }
  std::shared_ptr<std::byte> hand_out(std::size_t bytes) {
    return overhead_->hand_out(memory_of(bytes), bytes, &ledger_);
  }

  Ledger ledger_;
  std::shared_ptr<MemoryOverhead> overhead_ = std::make_shared<MemoryOverhead>();
};

TEST_F(MemoryOverheadTest, IsWhatNoBufferAskedFor) {
  overhead_->take(4096);
  EXPECT_EQ(peak(), 0);  // no buffer yet, so no overhead either
  auto first = hand_out(100);
  EXPECT_EQ(now(), 3996);
  const auto second = hand_out(4000 - 100);
  EXPECT_EQ(now(), 96);
  first.reset();  // the block lives on for the second
  EXPECT_EQ(now(), 196);
  EXPECT_EQ(peak(), 3996);
}

TEST_F(MemoryOverheadTest, NeverPeaksAtABufferThatComesOrGoes) {
  overhead_->take(1 << 20);
  auto large = hand_out((1 << 20) - 10);
  EXPECT_EQ(peak(), 10);
  overhead_->give_back(1 << 20);  // memory goes before the buffer is said to have gone
  large.reset();
  EXPECT_EQ(now(), 0);
  EXPECT_EQ(peak(), 10);
}

TEST_F(MemoryOverheadTest, MemoryThatIsHandedOutStaysWithItsBuffer) {
  const std::weak_ptr<std::byte> watched = [&] {
    const auto memory = memory_of(8);
    auto handed_out = overhead_->hand_out(memory, 8, &ledger_);
    EXPECT_EQ(handed_out.get(), memory.get());
    return std::weak_ptr<std::byte>(memory);
  }();
  EXPECT_TRUE(watched.expired());
}

TEST_F(MemoryOverheadTest, BuffersOutsideOfTheLedgerAreNotCountedForIt) {
  const auto uncounted = overhead_->hand_out(memory_of(8), 8, nullptr);
  overhead_->take(64);
  EXPECT_EQ(now(), 0);
  const auto counted = hand_out(16);
  EXPECT_EQ(now(), 48);
}

TEST_F(MemoryOverheadTest, BuffersMayOutliveTheirCommunicator) {
  overhead_->take(64);
  auto buffer = hand_out(16);
  overhead_.reset();
  EXPECT_EQ(now(), 48);
  buffer.reset();
  EXPECT_EQ(now(), 0);
}

}  // namespace
}  // namespace zb
