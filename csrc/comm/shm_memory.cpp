#include "comm/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace zb::shm {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

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

// Mappings of memfds that live in this process, by device and inode.
struct MappingRegistry {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> mappings;
};

MappingRegistry& mapping_registry() {
  static MappingRegistry registry;
  return registry;
}

std::string errno_text(int error_number) { return std::generic_category().message(error_number); }

}  // namespace

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t round_up_to_page(std::size_t bytes) noexcept {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

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

std::shared_ptr<Mapping> Mapping::of_file(const FileDescriptor& memfd, std::size_t bytes) {
  struct stat status{};
  ZB_SYS(::fstat(memfd.get(), &status));
  MappingRegistry& registry = mapping_registry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.mappings, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Mapping>& known = registry.mappings[{status.st_dev, status.st_ino}];
  if (auto mapping = known.lock()) return mapping;
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  if (data == MAP_FAILED) throw_out_of_memory(bytes, "mmap of shared memory: " + errno_text(errno));
  if (bytes >= kHugePageBytes) ::madvise(data, bytes, MADV_HUGEPAGE);  // where the system allows it for shared memory
  std::shared_ptr<Mapping> mapping(new Mapping(static_cast<std::byte*>(data), bytes));
  known = mapping;
  return mapping;
}

std::shared_ptr<Mapping> Mapping::anonymous(std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw_out_of_memory(bytes, "mmap: " + errno_text(errno));
  if (bytes >= kHugePageBytes) ::madvise(data, bytes, MADV_HUGEPAGE);
  return std::shared_ptr<Mapping>(new Mapping(static_cast<std::byte*>(data), bytes));
}

Mapping::~Mapping() { ::munmap(data_, bytes_); }

FileDescriptor create_memfd(std::size_t bytes) {
  int number = ::memfd_create("zerobench", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (number < 0 && errno == EINVAL) number = ::memfd_create("zerobench", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  FileDescriptor memfd(number);
  if (!memfd) throw_out_of_memory(bytes, "memfd_create: " + errno_text(errno));
  if (::ftruncate(memfd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_out_of_memory(bytes, "ftruncate of shared memory: " + errno_text(errno));
  }
  ZB_SYS(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
  return memfd;
}

int populate(std::byte* data, std::size_t bytes, const FileDescriptor* memfd, std::size_t offset_bytes) noexcept {
  if (bytes == 0 || ::madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno == EFAULT ? ENOMEM : errno;  // EFAULT is what would have been SIGBUS
  // Linux before 5.14.
  if (memfd != nullptr) {
    return ::posix_fallocate(memfd->get(), static_cast<off_t>(offset_bytes), static_cast<off_t>(bytes));
  }
  for (std::size_t i = 0; i < bytes; i += page_bytes()) *static_cast<volatile std::byte*>(data + i) = std::byte{0};
  return 0;
}

std::shared_ptr<Mapping> allocate_private(std::size_t bytes) {
  const std::size_t available = available_host_bytes();
  if (bytes > available) throw_out_of_memory(bytes, "only " + std::to_string(available) + " bytes are available");
  const std::size_t mapped_bytes = std::max(round_up_to_page(bytes), page_bytes());
  auto mapping = Mapping::anonymous(mapped_bytes);
  const int error_number = populate(mapping->data(), mapped_bytes, nullptr, 0);
  if (error_number != 0) throw_out_of_memory(bytes, errno_text(error_number));
  return mapping;
}

Buffer::Buffer(std::shared_ptr<Mapping> mapping, Shape shape, const void* owner, std::uint64_t id, BufferRole role,
               Allocation allocation)
    : mapping_(std::move(mapping)),
      shape_(shape),
      owner_(owner),
      id_(id),
      role_(role),
      allocation_(std::move(allocation)) {
  data_ = data_of(shape_.rank);
  bytes_ = shape_.bytes;
}

}  // namespace zb::shm
