#include "memory/ledger.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zb {
namespace {

TEST(Ledger, CountsByTierAndCategoryWithPeaks) {
  Ledger ledger;
  ledger.add(Tier::kDevice, Category::kMaster, 100);
  ledger.add(Tier::kDevice, Category::kExpAvg, 50);
  ledger.add(Tier::kHost, Category::kMaster, 7);
  ledger.remove(Tier::kDevice, Category::kMaster, 100);
  ledger.add(Tier::kDevice, Category::kMaster, 30);
  EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kMaster).current_bytes, 30);
  EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kMaster).peak_bytes, 100);
  EXPECT_EQ(ledger.entry(Tier::kHost, Category::kMaster).current_bytes, 7);
  EXPECT_EQ(ledger.entry(Tier::kNvme, Category::kMaster).peak_bytes, 0);
  EXPECT_EQ(ledger.total(Tier::kDevice).current_bytes, 80);
  EXPECT_EQ(ledger.total(Tier::kDevice).peak_bytes, 150);  // of one moment, not the sum of the categories' peaks
  ledger.reset_peaks();
  EXPECT_EQ(ledger.total(Tier::kDevice).peak_bytes, 80);
  EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kMaster).peak_bytes, 30);
  ledger.remove(Tier::kDevice, Category::kMaster, 30);
  ledger.remove(Tier::kDevice, Category::kExpAvg, 50);
}

TEST(Ledger, AllocationsCountWhileTheyLive) {
  Ledger ledger;
  const auto current = [&] { return ledger.entry(Tier::kDevice, Category::kStaging).current_bytes; };
  {
    Allocation first(&ledger, Tier::kDevice, Category::kStaging, 10);
    EXPECT_EQ(first.bytes(), 10U);
    Allocation second(std::move(first));
    EXPECT_EQ(current(), 10);
    Allocation third(&ledger, Tier::kDevice, Category::kStaging, 5);
    EXPECT_EQ(current(), 15);
    third = std::move(second);  // its own 5 bytes go, the 10 stay
    EXPECT_EQ(current(), 10);
    EXPECT_EQ(third.bytes(), 10U);
    Allocation& same = third;
    third = std::move(same);
    EXPECT_EQ(current(), 10);
    third = Allocation();
    EXPECT_EQ(current(), 0);
    const Allocation uncounted(nullptr, Tier::kDevice, Category::kStaging, 1000);
    EXPECT_EQ(current(), 0);
    const Allocation last(&ledger, Tier::kDevice, Category::kStaging, 3);
  }
  EXPECT_EQ(current(), 0);
  EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kStaging).peak_bytes, 15);
}

TEST(Ledger, AllocationsMayGrowAndShrink) {
  Ledger ledger;
  const auto entry = [&] { return ledger.entry(Tier::kDevice, Category::kCommunicators); };
  {
    Allocation held(&ledger, Tier::kDevice, Category::kCommunicators, 10);
    held.resize(25);
    EXPECT_EQ(entry().current_bytes, 25);
    held.resize(4);
    EXPECT_EQ(held.bytes(), 4U);
    EXPECT_EQ(entry().current_bytes, 4);
    EXPECT_EQ(entry().peak_bytes, 25);
    Allocation uncounted;
    uncounted.resize(7);
    EXPECT_EQ(uncounted.bytes(), 7U);
  }
  EXPECT_EQ(entry().current_bytes, 0);
}

TEST(Ledger, OnlyDeviceBytesJoinTheProcessUsage) {
  Ledger ledger;
  process_usage().reset_peak();
  const std::int64_t before = process_usage().current_bytes();
  {
    const Allocation device(&ledger, Tier::kDevice, Category::kParameters, 1 << 20);
    const Allocation host(&ledger, Tier::kHost, Category::kParameters, 1 << 24);
    EXPECT_EQ(process_usage().current_bytes(), before + (1 << 20));
  }
  EXPECT_EQ(process_usage().current_bytes(), before);
  EXPECT_EQ(process_usage().peak_bytes(), before + (1 << 20));
}

TEST(Ledger, ThreadsMayCountAtOnce) {
  Ledger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        const Allocation held(&ledger, Tier::kDevice, Category::kGradients, 8);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Ledger::Entry entry = ledger.entry(Tier::kDevice, Category::kGradients);
  EXPECT_EQ(entry.current_bytes, 0);
  EXPECT_GE(entry.peak_bytes, 8);
  EXPECT_LE(entry.peak_bytes, 32);
}

// A parameter keeps its buffer when the engine and its ledger are gone (freeing it once locked a destroyed mutex).
TEST(Ledger, AllocationsMayOutliveTheirLedger) {
  const std::int64_t before = process_usage().current_bytes();
  std::optional<Ledger> ledger(std::in_place);
  std::optional<Allocation> held(std::in_place, &*ledger, Tier::kDevice, Category::kParameters, 64);
  ledger.reset();
  EXPECT_EQ(process_usage().current_bytes(), before + 64);
  held.reset();
  EXPECT_EQ(process_usage().current_bytes(), before);
}

TEST(Ledger, EveryTierAndCategoryHasAName) {
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kTierNum; ++i) names.insert(tier_name(static_cast<Tier>(i)));
  for (std::size_t i = 0; i < kCategoryNum; ++i) names.insert(category_name(static_cast<Category>(i)));
  EXPECT_EQ(names.size(), kTierNum + kCategoryNum);
  EXPECT_EQ(names.count(""), 0U);
}

}  // namespace
}  // namespace zb
