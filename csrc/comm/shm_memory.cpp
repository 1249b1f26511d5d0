#include "comm/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace zb::shm {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

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
  std::shared_ptr<Mapping> mapping(new Mapping(static_cast<std::byte*>(data), bytes, status.st_ino));
  known = mapping;
  return mapping;
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

int populate_file(const FileDescriptor& memfd, const Mapping& mapping, std::size_t offset_bytes,
                  std::size_t bytes) noexcept {
  const int error_number = populate(mapping.data() + offset_bytes, bytes);
  if (error_number != EINVAL) return error_number;
  return ::posix_fallocate(memfd.get(), static_cast<off_t>(offset_bytes), static_cast<off_t>(bytes));
}

}  // namespace zb::shm
