#include "comm/shm_memory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "common/page.h"

namespace zb::shm {
namespace {

class SharedMemory : public testing::TestWithParam<std::size_t> {};

// Parts of odd sizes, so that huge pages lie across their ends.
TEST_P(SharedMemory, EveryPartIsPopulatedAndZero) {
  const std::size_t part_bytes = GetParam();
  constexpr std::size_t kPartNum = 3;
  const std::size_t bytes = kPartNum * part_bytes;
  const FileDescriptor memfd = create_memfd(bytes);
  const std::shared_ptr<Mapping> mapping = Mapping::of_file(memfd, bytes);
  if (bytes >= kHugePageBytes) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping->data()) % kHugePageBytes, 0U);
  }
  for (std::size_t part = 0; part < kPartNum; ++part) {
    ASSERT_EQ(populate_file(memfd, *mapping, part * part_bytes, part_bytes), 0);
  }
  struct stat status{};
  ASSERT_EQ(::fstat(memfd.get(), &status), 0);
  EXPECT_EQ(static_cast<std::size_t>(status.st_size), bytes);
  EXPECT_GE(static_cast<std::size_t>(status.st_blocks) * 512, bytes);
  for (std::size_t at = 0; at < bytes; ++at) ASSERT_EQ(mapping->data()[at], std::byte{0}) << at;
}

TEST_P(SharedMemory, WhatIsThereSurvivesTheNextPart) {
  const std::size_t part_bytes = GetParam();
  const FileDescriptor memfd = create_memfd(2 * part_bytes);
  const std::shared_ptr<Mapping> mapping = Mapping::of_file(memfd, 2 * part_bytes);
  ASSERT_EQ(populate_file(memfd, *mapping, 0, part_bytes), 0);
  for (std::size_t at = 0; at < part_bytes; ++at) mapping->data()[at] = static_cast<std::byte>(at * 7);
  ASSERT_EQ(populate_file(memfd, *mapping, part_bytes, part_bytes), 0);
  std::vector<std::byte> read(part_bytes);
  ASSERT_EQ(::pread(memfd.get(), read.data(), read.size(), 0), static_cast<ssize_t>(read.size()));
  for (std::size_t at = 0; at < part_bytes; ++at) ASSERT_EQ(read[at], static_cast<std::byte>(at * 7)) << at;
}

INSTANTIATE_TEST_SUITE_P(Sizes, SharedMemory,
                         testing::Values(page_bytes(), kHugePageBytes - page_bytes(), kHugePageBytes,
                                         kHugePageBytes + page_bytes(), 3 * kHugePageBytes + 5 * page_bytes()));

TEST(SharedMemory, RanksOfOneProcessShareAMapping) {
  const FileDescriptor memfd = create_memfd(kHugePageBytes);
  EXPECT_EQ(Mapping::of_file(memfd, kHugePageBytes), Mapping::of_file(memfd, kHugePageBytes));
}

}  // namespace
}  // namespace zb::shm
