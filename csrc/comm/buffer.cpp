#include "comm/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace zb {
namespace {

std::optional<std::size_t> read_number(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

// "MemAvailable:   12345 kB" and the lines of memory.stat.
std::optional<std::size_t> read_field(const char* path, std::string_view name) {
  std::ifstream file(path);
  std::string key;
  std::string rest;
  while (file >> key) {
    std::size_t value = 0;
    if (key == name && file >> value) return value;
    std::getline(file, rest);
  }
  return std::nullopt;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* stat;
  const char* reclaimable;
};

constexpr CgroupFiles kCgroups[] = {
    {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"},
    {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
     "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"},
};

}  // namespace

std::size_t available_host_bytes() {
  std::size_t available = std::numeric_limits<std::size_t>::max();
  if (const auto kilobytes = read_field("/proc/meminfo", "MemAvailable:")) available = *kilobytes * 1024;
  for (const CgroupFiles& cgroup : kCgroups) {
    const auto limit = read_number(cgroup.limit);
    const auto usage = read_number(cgroup.usage);
    if (!limit || !usage) continue;
    const std::size_t used = *usage - std::min(*usage, read_field(cgroup.stat, cgroup.reclaimable).value_or(0));
    available = std::min(available, *limit - std::min(*limit, used));
  }
  return available;
}

void throw_out_of_memory(std::size_t bytes, const std::string& why) {
  throw OutOfMemoryError("cannot allocate " + std::to_string(bytes) + " bytes of host memory: " + why +
                         "; use a smaller model, batch or world size");
}

int populate(std::byte* data, std::size_t bytes) noexcept {
  if (bytes == 0 || ::madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  return errno == EFAULT ? ENOMEM : errno;  // EFAULT is what would have been SIGBUS
}

std::shared_ptr<Buffer> allocate_local(std::size_t bytes, BufferRole role, Ledger* ledger, Category category) {
  const std::size_t available = available_host_bytes();
  if (bytes > available) throw_out_of_memory(bytes, "only " + std::to_string(available) + " bytes are available");
  HostBuffer memory(bytes, ledger, Tier::kDevice, category);
  const int error_number = populate(memory.data(), bytes);
  // Without the call, pages come at the first touch.
  if (error_number != 0 && error_number != EINVAL) {
    throw_out_of_memory(bytes, std::generic_category().message(error_number));
  }
  return std::make_shared<Buffer>(bytes, role, std::move(memory));
}

Buffer::Buffer(std::size_t bytes, BufferRole role, HostBuffer memory) : role_(role), memory_(std::move(memory)) {
  data_ = memory_.data();
  bytes_ = bytes;
}

Buffer::Buffer(std::size_t bytes, Parts parts, Allocation allocation)
    : role_(BufferRole::kShared), parts_(std::move(parts)), allocation_(std::move(allocation)) {
  data_ = data_of(parts_.rank);
  bytes_ = bytes;
}

}  // namespace zb
