#include "memory/numa.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "common/error.h"
#include "common/thread_pool.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

namespace fs = std::filesystem;

class Numa : public ::testing::Test {
 protected:
  Numa() {
    char folder[] = "/tmp/zb_numa_XXXXXX";
    root_ = mkdtemp(folder);
  }
  ~Numa() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  std::string root_;
};

TEST_F(Numa, ListsOfNumbers) {
  EXPECT_EQ(parse_number_list("0-3,8,10-11"), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_TRUE(parse_number_list("").empty());
  for (const char* text : {"a", "1-", "-1", "1,,2", "1 2"})
    EXPECT_THROW(parse_number_list(text), ArgumentError) << text;
}

TEST_F(Numa, ANodeIsWhereMostCpusAre) {
  write("/devices/system/node/online", "0,2\n");
  write("/devices/system/node/node0/cpulist", "0-3\n");
  write("/devices/system/node/node2/cpulist", "4-7\n");
  const std::vector<NumaNode> nodes = numa_nodes(root_);
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[1].number, 2);
  EXPECT_EQ(node_of_cpus(std::vector<int>{3, 4, 5}, nodes), 2);
  EXPECT_EQ(node_of_cpus(std::vector<int>{0, 4}, nodes), 0);
  EXPECT_EQ(node_of_cpus(std::vector<int>{99}, nodes), kAnyNode);
}

TEST_F(Numa, AMachineWithoutSysfsHasNoNodes) { EXPECT_TRUE(numa_nodes(root_).empty()); }

// Such as a node of CPUs alone, or one that a container may not take memory of.
TEST(NumaOfThisMachine, ANodeWithoutMemoryForThisProcessIsNoError) {
  const HostBuffer memory(1 << 20, "a test");
  EXPECT_FALSE(prefer_node(memory.data(), memory.bytes(), 1023));
  memory.data()[0] = std::byte{1};
}

TEST(NumaOfThisMachine, CpusOfThisProcessBelongToAListedNode) {
  const std::vector<NumaNode> nodes = numa_nodes();
  if (nodes.empty()) GTEST_SKIP() << "sysfs lists no NUMA nodes";
  EXPECT_NE(node_of_cpus(allowed_cpus(), nodes), kAnyNode);
}

}  // namespace
}  // namespace zb
