#include "memory/host_limits.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "common/error.h"

namespace zb {
namespace {

namespace fs = std::filesystem;

// Files as the kernel shows them, in a folder of the test's own.
class HostLimits : public ::testing::Test {
 protected:
  HostLimits() {
    char folder[] = "/tmp/zb_limits_XXXXXX";
    root_ = mkdtemp(folder);
    files_ = {.proc = root_ + "/proc", .cgroup = root_ + "/cgroup"};
    write("/proc/meminfo", "MemTotal:       9000 kB\nMemFree:   100 kB\nMemAvailable:   4000 kB\nBuffers: 1 kB\n");
  }
  ~HostLimits() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  std::string root_;
  HostFiles files_;
};

TEST_F(HostLimits, MemAvailableLimitsWithoutCgroups) {
  const HostMemory memory = available_host_memory(files_);
  EXPECT_EQ(memory.available_bytes, 4000U * 1024);
  EXPECT_EQ(memory.limited_by, "MemAvailable");
}

TEST_F(HostLimits, TheNearestLimitOfVersion2CountsAlsoAboveTheOwnCgroup) {
  write("/proc/self/cgroup", "0::/user.slice/job.scope\n");
  write("/cgroup/user.slice/job.scope/memory.max", "max\n");
  write("/cgroup/user.slice/job.scope/memory.current", "5\n");
  write("/cgroup/user.slice/memory.max", "1000000\n");
  write("/cgroup/user.slice/memory.current", "700000\n");
  write("/cgroup/user.slice/memory.stat", "anon 3\ninactive_file 200000\n");
  const HostMemory memory = available_host_memory(files_);
  EXPECT_EQ(memory.available_bytes, 500000U);
  EXPECT_EQ(memory.limited_by, files_.cgroup + "/user.slice/memory.max");
}

TEST_F(HostLimits, AContainerSeesItsCgroupAtTheMount) {
  write("/proc/self/cgroup", "5:cpu:/\n4:memory,blkio:/docker/0123\n");
  write("/cgroup/memory/memory.limit_in_bytes", "2000000\n");
  write("/cgroup/memory/memory.usage_in_bytes", "2500000\n");
  EXPECT_EQ(available_host_memory(files_).available_bytes, 0U);
}

TEST_F(HostLimits, AShortageSaysHowMuchIsMissing) {
  require_host_memory(4000U * 1024, "optimizer state", files_);
  try {
    require_host_memory(6000U * 1024, "optimizer state", files_);
    FAIL() << "no error";
  } catch (const OutOfMemoryError& error) {
    const std::string text = error.what();
    for (const char* part : {"optimizer state needs 5.9 MiB", "3.9 MiB are available (MemAvailable)", "2.0 MiB are"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

TEST_F(HostLimits, WhatIsLockedAlreadyCountsUnlessTheProcessMayLockAnything) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  write("/proc/self/status", "Name:\tx\nVmLck:\t       4 kB\nCapEff:\t0000000000000000\n");
  if (limit.rlim_cur == RLIM_INFINITY) {
    EXPECT_EQ(lockable_bytes(files_), std::numeric_limits<std::size_t>::max());
  } else {
    EXPECT_EQ(lockable_bytes(files_), limit.rlim_cur - std::min<std::size_t>(limit.rlim_cur, 4096));
    EXPECT_THROW(require_lockable(limit.rlim_cur, "a pool", files_), OutOfMemoryError);
  }
  write("/proc/self/status", "VmLck:\t       4 kB\nCapEff:\t0000000000004000\n");
  EXPECT_EQ(lockable_bytes(files_), std::numeric_limits<std::size_t>::max());
}

TEST(HostMemoryOfThisMachine, IsSomething) {
  EXPECT_GT(available_host_bytes(), std::size_t{1} << 20);
  EXPECT_LT(available_host_bytes(), std::size_t{1} << 50);
}

}  // namespace
}  // namespace zb
