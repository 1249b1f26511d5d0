#include "memory/host_buffer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "common/error.h"

namespace zb {
namespace {

std::int64_t master_bytes(const Ledger& ledger) { return ledger.entry(Tier::kDevice, Category::kMaster).current_bytes; }

TEST(HostBuffer, IsZeroFilledAlignedAndCountedExactly) {
  Ledger ledger;
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4096}, std::size_t{5000}, std::size_t{4} << 20, (std::size_t{5} << 20) + 12}) {
    const HostBuffer buffer(bytes, &ledger, Tier::kDevice, Category::kMaster);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(master_bytes(ledger), static_cast<std::int64_t>(bytes));
    const std::size_t alignment = bytes >= std::size_t{4} << 20 ? std::size_t{2} << 20 : 4096;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % alignment, 0U);
    for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(buffer.data()[i], std::byte{0});
    for (std::size_t i = 0; i < bytes; ++i) buffer.data()[i] = std::byte{0xFF};
  }
  EXPECT_EQ(master_bytes(ledger), 0);
}

TEST(HostBuffer, MovesCarryMemoryAndCount) {
  Ledger ledger;
  HostBuffer first(100, &ledger, Tier::kDevice, Category::kMaster);
  first.as<float>()[3] = 7.0F;
  HostBuffer second(std::move(first));
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.bytes(), 0U);
  EXPECT_EQ(second.as<float>()[3], 7.0F);
  HostBuffer third(60, &ledger, Tier::kDevice, Category::kMaster);
  third = std::move(second);
  EXPECT_EQ(third.as<float>()[3], 7.0F);
  EXPECT_EQ(master_bytes(ledger), 100);
  third = HostBuffer();
  EXPECT_EQ(master_bytes(ledger), 0);
}

TEST(HostBuffer, EmptyHoldsNothing) {
  Ledger ledger;
  const HostBuffer buffer(0, &ledger, Tier::kDevice, Category::kMaster);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kMaster).peak_bytes, 0);
}

TEST(HostBuffer, TooMuchIsAnErrorWithSizesAndCountsNothing) {
  Ledger ledger;
  const HostBuffer held(std::size_t{3} << 20, &ledger, Tier::kDevice, Category::kExpAvg);
  for (const std::size_t bytes : {std::size_t{1} << 60, ~std::size_t{0}}) {
    try {
      const HostBuffer buffer(bytes, &ledger, Tier::kDevice, Category::kMaster);
      FAIL() << "mapped " << bytes << " bytes";
    } catch (const OutOfMemoryError& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("3.0 MiB"), std::string::npos);
    }
  }
  EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kMaster).peak_bytes, 0);
}

}  // namespace
}  // namespace zb
