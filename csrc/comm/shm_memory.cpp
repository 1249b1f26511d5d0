#include "comm/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#include "common/page.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace zb::shm {
namespace {

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

// Only where address and file offset agree modulo a huge page can huge pages be mapped.
std::byte* map_file(const FileDescriptor& memfd, std::size_t bytes) {
  const bool is_huge = bytes >= kHugePageBytes;
  const std::size_t mapped_bytes = round_up_to_page(bytes);
  const std::size_t wide_bytes = mapped_bytes + (is_huge ? kHugePageBytes : 0);
  void* wide = ::mmap(nullptr, wide_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) throw_out_of_memory(bytes, "mmap of shared memory: " + errno_text(errno));
  auto* const begin = is_huge ? trim_to_huge_page(wide, mapped_bytes) : static_cast<std::byte*>(wide);
  if (::mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd.get(), 0) == MAP_FAILED) {
    const int error_number = errno;
    ::munmap(begin, mapped_bytes);
    throw_out_of_memory(bytes, "mmap of shared memory: " + errno_text(error_number));
  }
  return begin;
}

// Huge pages for those that begin in this part of the mapping, also where the system gives none to shared memory by
// itself (transparent_hugepage/shmem_enabled is `never` by default). One small page each is there first: a range
// without any cannot be collapsed, and one that is full would be copied. Best effort: what stays small works too.
void collapse_to_huge_pages(const Mapping& mapping, std::size_t offset_bytes, std::size_t bytes) noexcept {
  const std::size_t end_bytes = std::min(round_up_to_huge_page(offset_bytes + bytes), mapping.bytes());
  for (std::size_t begin = round_up_to_huge_page(offset_bytes);
       begin < offset_bytes + bytes && begin + kHugePageBytes <= end_bytes; begin += kHugePageBytes) {
    if (populate(mapping.data() + begin, page_bytes()) != 0) return;
    if (::madvise(mapping.data() + begin, kHugePageBytes, MADV_COLLAPSE) != 0) return;
  }
}

}  // namespace

std::shared_ptr<Mapping> Mapping::of_file(const FileDescriptor& memfd, std::size_t bytes) {
  struct stat status{};
  ZB_SYS(::fstat(memfd.get(), &status));
  MappingRegistry& registry = mapping_registry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.mappings, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Mapping>& known = registry.mappings[{status.st_dev, status.st_ino}];
  if (auto mapping = known.lock()) return mapping;
  std::shared_ptr<Mapping> mapping(new Mapping(map_file(memfd, bytes), bytes, status.st_ino));
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
  collapse_to_huge_pages(mapping, offset_bytes, bytes);
  const int error_number = populate(mapping.data() + offset_bytes, bytes);
  if (error_number != EINVAL) return error_number;
  return ::posix_fallocate(memfd.get(), static_cast<off_t>(offset_bytes), static_cast<off_t>(bytes));
}

}  // namespace zb::shm
