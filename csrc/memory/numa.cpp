#include "memory/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <fstream>

#include "common/error.h"

namespace zb {
namespace {

constexpr int kModePreferred = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>, which is not always installed

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int parse_number(std::string_view text, std::string_view whole) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  ZB_EXPECT(error == std::errc() && end == text.data() + text.size() && value >= 0,
            std::string(whole) + " is not a list of numbers such as 0-3,8");
  return value;
}

}  // namespace

std::vector<int> parse_number_list(std::string_view text) {
  std::vector<int> numbers;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view range = rest.substr(0, comma);
    const std::size_t dash = range.find('-');
    const int first = parse_number(range.substr(0, dash), text);
    const int last = dash == std::string_view::npos ? first : parse_number(range.substr(dash + 1), text);
    for (int number = first; number <= last; ++number) numbers.push_back(number);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return numbers;
}

std::vector<NumaNode> numa_nodes(const std::string& sysfs) {
  const std::string folder = sysfs + "/devices/system/node/";
  std::vector<NumaNode> nodes;
  for (const int number : parse_number_list(read_line(folder + "online"))) {
    nodes.push_back({number, parse_number_list(read_line(folder + "node" + std::to_string(number) + "/cpulist"))});
  }
  return nodes;
}

int node_of_cpus(std::span<const int> cpus, const std::vector<NumaNode>& nodes) {
  int best = kAnyNode;
  std::ptrdiff_t best_num = 0;
  for (const NumaNode& node : nodes) {
    const std::ptrdiff_t own_num = std::count_if(cpus.begin(), cpus.end(), [&](int cpu) {
      return std::find(node.cpus.begin(), node.cpus.end(), cpu) != node.cpus.end();
    });
    if (own_num > best_num) {
      best = node.number;
      best_num = own_num;
    }
  }
  return best;
}

bool prefer_node(std::byte* data, std::size_t bytes, int node) {
  constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  ZB_EXPECT(node >= 0, "memory cannot be placed on node " + std::to_string(node) + "; nodes count from 0");
  std::vector<unsigned long> mask(static_cast<std::size_t>(node) / kBits + 1, 0);
  mask.back() = 1UL << (static_cast<std::size_t>(node) % kBits);
  // The kernel reads one bit less than it is told.
  if (syscall(SYS_mbind, data, bytes, kModePreferred, mask.data(), mask.size() * kBits + 1, 0) == 0) return true;
  if (errno == EPERM || errno == ENOSYS || errno == EINVAL) return false;
  detail::throw_system("mbind", {}, std::source_location::current());
}

}  // namespace zb
