#include "memory/host_limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

#include "common/error.h"

namespace zb {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

// "MemAvailable:   12345 kB" and the lines of memory.stat.
std::optional<std::size_t> read_field(const std::string& path, std::string_view name, int base = 10) {
  std::ifstream file(path);
  std::string key;
  std::string rest;
  while (file >> key) {
    std::size_t value = 0;
    if (base == 16) file >> std::hex;
    if (key == name && file >> value) return value;
    file.clear();
    std::getline(file, rest);
  }
  return std::nullopt;
}

// A version of cgroups by the names of its files.
struct CgroupNames {
  std::string_view folder;  // below the mount
  std::string_view limit;
  std::string_view usage;
  std::string_view reclaimable;  // in memory.stat
};

constexpr CgroupNames kVersion2{"", "memory.max", "memory.current", "inactive_file"};
constexpr CgroupNames kVersion1{"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

void limit_by_folder(HostMemory& memory, const CgroupNames& names, const std::string& folder) {
  const std::string limit_file = folder + "/" + std::string(names.limit);
  const auto limit = read_number(limit_file);
  const auto usage = read_number(folder + "/" + std::string(names.usage));
  if (!limit || !usage) return;
  const std::size_t reclaimable = read_field(folder + "/memory.stat", names.reclaimable).value_or(0);
  const std::size_t used = *usage - std::min(*usage, reclaimable);
  const std::size_t left = *limit - std::min(*limit, used);
  if (left >= memory.available_bytes) return;
  memory = {left, limit_file};
}

// A cgroup's own folder and those above it. In a container the mount often begins at its own cgroup, and the path that
// the kernel names is not there: then only the mount's folder counts.
void limit_by_path(HostMemory& memory, const CgroupNames& names, const std::string& mount, std::string path) {
  while (!path.empty() && path != "/") {
    limit_by_folder(memory, names, mount + path);
    path.resize(path.rfind('/'));
  }
  limit_by_folder(memory, names, mount);
}

// Lines of /proc/self/cgroup: "0::/path" (version 2) or "4:memory:/path".
void limit_by_cgroups(HostMemory& memory, const HostFiles& files) {
  std::string path1;
  std::string path2;
  std::ifstream file(files.proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = std::string(",").append(line, first + 1, second - first - 1).append(",");
    if (controllers == ",,") path2 = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) path1 = line.substr(second + 1);
  }
  limit_by_path(memory, kVersion2, files.cgroup + std::string(kVersion2.folder), path2);
  limit_by_path(memory, kVersion1, files.cgroup + std::string(kVersion1.folder), path1);
}

}  // namespace

HostMemory available_host_memory(const HostFiles& files) {
  HostMemory memory{kUnlimited, "nothing"};
  if (const auto kilobytes = read_field(files.proc + "/meminfo", "MemAvailable:")) {
    memory = {*kilobytes * 1024, "MemAvailable"};
  }
  limit_by_cgroups(memory, files);
  return memory;
}

std::size_t lock_limit_bytes() {
  rlimit limit{};
  ZB_SYS(getrlimit(RLIMIT_MEMLOCK, &limit));
  return limit.rlim_cur == RLIM_INFINITY ? kUnlimited : static_cast<std::size_t>(limit.rlim_cur);
}

std::size_t lockable_bytes(const HostFiles& files) {
  constexpr std::size_t kIpcLock = std::size_t{1} << 14;
  const std::string status = files.proc + "/self/status";
  const std::size_t allowed = lock_limit_bytes();
  if (allowed == kUnlimited || (read_field(status, "CapEff:", 16).value_or(0) & kIpcLock) != 0) return kUnlimited;
  return allowed - std::min(allowed, read_field(status, "VmLck:").value_or(0) * 1024);
}

std::string memory_text(std::size_t bytes) {
  if (bytes == kUnlimited) return "any amount";
  constexpr double kMib = 1024.0 * 1024.0;
  const auto amount = static_cast<double>(bytes);
  if (amount < kMib) return std::to_string(bytes) + " bytes";
  char text[64];
  if (amount < 1024.0 * kMib) {
    std::snprintf(text, sizeof text, "%.1f MiB", amount / kMib);
  } else {
    std::snprintf(text, sizeof text, "%.1f GiB", amount / (1024.0 * kMib));
  }
  return text;
}

void require_host_memory(std::size_t bytes, std::string_view what, const HostFiles& files) {
  const HostMemory memory = available_host_memory(files);
  if (bytes <= memory.available_bytes) return;
  throw OutOfMemoryError("host memory is too small: " + std::string(what) + " needs " + memory_text(bytes) + ", " +
                         memory_text(memory.available_bytes) + " are available (" + memory.limited_by + "), " +
                         memory_text(bytes - memory.available_bytes) +
                         " are missing; use more ranks or hosts, a smaller model, offload less, or raise the limit of "
                         "the container");
}

void require_lockable(std::size_t bytes, std::string_view what, const HostFiles& files) {
  const std::size_t lockable = lockable_bytes(files);
  if (bytes <= lockable) return;
  throw OutOfMemoryError("the limit of locked memory is too low: " + std::string(what) + " needs " +
                         memory_text(bytes) + ", RLIMIT_MEMLOCK leaves " + memory_text(lockable) + ", " +
                         memory_text(bytes - lockable) +
                         " are missing; raise it (`ulimit -l`, LimitMEMLOCK=, docker run --ulimit memlock=-1) or do "
                         "not lock");
}

}  // namespace zb
