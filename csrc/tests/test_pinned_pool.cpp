#include "memory/pinned_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/thread_pool.h"
#include "fork_support.h"
#include "memory/host_limits.h"

namespace zb {
namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;

std::int64_t host_bytes(const Ledger& ledger, Category category) {
  return ledger.entry(Tier::kHost, category).current_bytes;
}

std::size_t resident_pages(const std::byte* data, std::size_t bytes) {
  std::vector<unsigned char> pages((bytes + 4095) / 4096);
  EXPECT_EQ(mincore(const_cast<std::byte*>(data), bytes, pages.data()), 0);
  std::size_t num = 0;
  for (const unsigned char page : pages) num += page & 1U;
  return num;
}

TEST(PinnedMapping, IsExactAlignedZeroAndAllThere) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, 2 * kMib, 9 * kMib + 5}) {
    for (const std::size_t thread_num : {1, 3}) {
      const PinnedMapping mapping(bytes, {.thread_num = thread_num});
      EXPECT_GE(mapping.bytes(), bytes);
      EXPECT_LT(mapping.bytes(), bytes + 4096);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping.data()) % (bytes < 2 * kMib ? 4096 : 2 * kMib), 0U);
      EXPECT_EQ(resident_pages(mapping.data(), mapping.bytes()), mapping.bytes() / 4096);
      for (std::size_t i = 0; i < mapping.bytes(); i += 509) ASSERT_EQ(mapping.data()[i], std::byte{0});
      EXPECT_LE(mapping.huge_bytes(), mapping.bytes());
      EXPECT_FALSE(mapping.is_registered());
    }
  }
}

TEST(PinnedMapping, OfNothingIsNothing) {
  const PinnedMapping mapping(0, {});
  EXPECT_EQ(mapping.data(), nullptr);
  EXPECT_EQ(mapping.bytes(), 0U);
}

// What a device would be told, and whether the calls match.
class RecordingRegistrar final : public HostRegistrar {
 public:
  void register_host(std::byte* data, std::size_t bytes) override {
    if (refuses) throw OutOfMemoryError("refused");
    registered.emplace(data, bytes);
  }
  void unregister_host(std::byte* data) noexcept override {
    EXPECT_EQ(registered.erase(data), 1U);
    data[0] = std::byte{1};  // must still be mapped
  }

  std::map<std::byte*, std::size_t> registered;
  bool refuses = false;
};

TEST(PinnedMapping, IsRegisteredWholeAndUnregisteredBeforeItGoes) {
  const auto registrar = std::make_shared<RecordingRegistrar>();
  {
    const PinnedMapping mapping(3 * kMib, {.registrar = registrar});
    EXPECT_TRUE(mapping.is_registered());
    ASSERT_EQ(registrar->registered.size(), 1U);
    EXPECT_EQ(registrar->registered.at(mapping.data()), 3 * kMib);
  }
  EXPECT_TRUE(registrar->registered.empty());
  registrar->refuses = true;
  EXPECT_THROW(PinnedMapping(3 * kMib, {.registrar = registrar}), OutOfMemoryError);
}

TEST(PinnedMapping, MoreThanTheMachineHasIsRefusedBeforeItIsMapped) {
  try {
    const PinnedMapping mapping(std::size_t{1} << 50, {.what = "exp_avg"});
    FAIL() << "mapped a PiB";
  } catch (const OutOfMemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("exp_avg needs 1048576.0 GiB"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("are missing"), std::string::npos);
  }
}

TEST(PinnedMapping, LocksWithinTheLimitAndSaysWhereItEnds) {
  const std::size_t lockable = lockable_bytes();
  if (lockable >= 64 * 1024) {
    EXPECT_NO_THROW(PinnedMapping(64 * 1024, {.lock = PageLock::kLocked}));
  }
  // In a child, whose limit may be lowered and which gives up CAP_IPC_LOCK.
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    const rlimit none{0, 0};
    if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || (geteuid() == 0 && setuid(kNobody) != 0)) _exit(3);
    if (lockable_bytes() != 0) _exit(2);
    try {
      const PinnedMapping mapping(kMib, {.lock = PageLock::kLocked});
    } catch (const OutOfMemoryError& error) {
      _exit(std::string(error.what()).find("RLIMIT_MEMLOCK") != std::string::npos ? 0 : 4);
    }
    _exit(5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(PinnedMapping, IsNoPartOfAForkedChild) {
  const PinnedMapping mapping(kMib, {});
  const pid_t child = fork();
  if (child == 0) {
    unsigned char page = 0;
    _exit(mincore(mapping.data(), 4096, &page) == -1 && errno == ENOMEM ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(PinnedMapping, AForkedChildThatDropsItUnmapsNothingOfItsOwn) {
  auto mapping = std::make_unique<PinnedMapping>(kMib, PinnedOptions{});
  EXPECT_TRUE(test::holds_in_child([&] {
    auto* const own = static_cast<char*>(
        mmap(mapping->data(), kMib, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    if (own == MAP_FAILED) return false;
    mapping.reset();
    unsigned char page = 0;
    return mincore(own, 4096, &page) == 0;
  }));
  mapping->data()[0] = std::byte{1};
}

TEST(PinnedMapping, TakesANodesMemoryWhereTheKernelAllows) {
  const int node = node_of_cpus(allowed_cpus(), numa_nodes());
  if (node == kAnyNode) GTEST_SKIP() << "sysfs lists no NUMA nodes";
  const PinnedMapping mapping(kMib, {.numa_node = node});
  EXPECT_EQ(resident_pages(mapping.data(), kMib), kMib / 4096);
}

TEST(PinnedPool, BlocksAreCountedByCategoryAndGivenBack) {
  Ledger ledger;
  PinnedPool pool(kMib, &ledger, {});
  EXPECT_EQ(pool.stats().mapped_bytes, kMib);
  PinnedBlock first = pool.allocate(1000, Category::kMaster);
  ASSERT_NE(first.data(), nullptr);
  EXPECT_EQ(host_bytes(ledger, Category::kMaster), 1000);
  EXPECT_EQ(pool.stats().requested_bytes, 1000U);
  PinnedBlock moved = std::move(first);
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(moved.bytes(), 1000U);
  moved = PinnedBlock();
  EXPECT_EQ(host_bytes(ledger, Category::kMaster), 0);
  EXPECT_EQ(pool.stats().requested_bytes, 0U);
  EXPECT_EQ(pool.stats().peak_requested_bytes, 1000U);
}

TEST(PinnedPool, AnExactSumOfBlocksFits) {
  const std::vector<std::size_t> sizes{64, 1, 4096, 100'001, 63, 1'000'000};
  for (const std::size_t alignment : {std::size_t{64}, std::size_t{4096}}) {
    std::size_t total = 0;
    for (const std::size_t bytes : sizes) total += PinnedPool::footprint_bytes(bytes, alignment);
    PinnedPool pool(total, nullptr, {});
    std::vector<PinnedBlock> blocks;
    for (const std::size_t bytes : sizes) {
      blocks.push_back(pool.allocate(bytes, Category::kExpAvg, alignment));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data()) % alignment, 0U);
    }
    const PinnedStats stats = pool.stats();
    if (alignment == 64) {
      EXPECT_LE(static_cast<double>(stats.mapped_bytes), 1.01 * static_cast<double>(stats.requested_bytes));
    }
    EXPECT_THROW(pool.allocate(8192, Category::kExpAvg), OutOfMemoryError);
  }
}

TEST(PinnedPool, BlocksNeverOverlapAndGapsGrowTogetherAgain) {
  std::mt19937 random(5);
  Ledger ledger;
  PinnedPool pool(kMib, &ledger, {});
  struct Held {
    PinnedBlock block;
    std::byte mark;
  };
  std::vector<Held> held;
  for (int round = 0; round < 4000; ++round) {
    if (held.empty() || random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % 60'000;
      const std::size_t alignment = std::size_t{1} << (random() % 13);
      try {
        held.push_back({pool.allocate(bytes, Category::kStaging, alignment), static_cast<std::byte>(random())});
      } catch (const OutOfMemoryError&) {
        continue;
      }
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(held.back().block.data()) % alignment, 0U);
      std::memset(held.back().block.data(), static_cast<int>(held.back().mark), bytes);
    } else {
      const std::size_t index = random() % held.size();
      const Held gone = std::move(held[index]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
      for (std::size_t i = 0; i < gone.block.bytes(); ++i) ASSERT_EQ(gone.block.data()[i], gone.mark);
    }
  }
  held.clear();
  EXPECT_EQ(host_bytes(ledger, Category::kStaging), 0);
  EXPECT_EQ(pool.allocate(kMib, Category::kStaging).bytes(), kMib);
}

TEST(PinnedPool, ABlockMayOutliveItsPool) {
  PinnedBlock block;
  {
    PinnedPool pool(4096, nullptr, {});
    block = pool.allocate(4096, Category::kStaging);
  }
  std::memset(block.data(), 7, block.bytes());
  EXPECT_EQ(block.data()[4095], std::byte{7});
}

TEST(PinnedPool, IsLegalForDirectTransfers) {
  PinnedPool pool(3 * 4096, nullptr, {});
  const PinnedBlock other = pool.allocate(10, Category::kStaging);
  const PinnedBlock block = pool.allocate(4096, Category::kStaging);
  std::memset(block.data(), 0x5A, block.bytes());
  char path[] = "/var/tmp/zb_direct_XXXXXX";
  const int made = mkstemp(path);
  ASSERT_GE(made, 0);
  close(made);
  const int file = open(path, O_RDWR | O_DIRECT);
  unlink(path);
  if (file < 0) GTEST_SKIP() << "this file system refuses O_DIRECT";
  EXPECT_EQ(pwrite(file, block.data(), 4096, 0), 4096);
  std::memset(block.data(), 0, block.bytes());
  EXPECT_EQ(pread(file, block.data(), 4096, 0), 4096);
  EXPECT_EQ(block.data()[4095], std::byte{0x5A});
  close(file);
}

}  // namespace
}  // namespace zb
