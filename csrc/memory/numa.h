// NUMA nodes from sysfs, and memory on one of them. A machine without NUMA has one node or none listed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zb {

inline constexpr int kAnyNode = -1;

struct NumaNode {
  int number = 0;
  std::vector<int> cpus;
};

// "0-3,8,10-11" as the kernel writes lists. Throws ArgumentError for anything else.
std::vector<int> parse_number_list(std::string_view text);

// Nodes in order; empty where sysfs lists none.
std::vector<NumaNode> numa_nodes(const std::string& sysfs = "/sys");

// The node that most of these CPUs belong to; kAnyNode where there are no nodes.
int node_of_cpus(std::span<const int> cpus, const std::vector<NumaNode>& nodes);

// Pages of the range that are not there yet will come from `node`, or from another where it is full. Returns false
// where the kernel does not let this process choose (containers often forbid it), or has no memory for it there (a node
// of CPUs alone, a cpuset); then pages come from the node of the thread that touches them first. Throws IoError for
// other errors.
bool prefer_node(std::byte* data, std::size_t bytes, int node);

}  // namespace zb
