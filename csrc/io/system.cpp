#include "io/system.h"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/error.h"

namespace zb {
namespace {

template <class Result>
Result or_errno(Result result) {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

}  // namespace

int System::open(const char* path, int flags, mode_t mode) { return or_errno(::open(path, flags, mode)); }

int System::close(int fd) { return or_errno(::close(fd)); }

int System::unlink(const char* path) { return or_errno(::unlink(path)); }

int System::flock(int fd, int operation) { return or_errno(::flock(fd, operation)); }

int System::link_num(int fd) {
  struct stat facts{};
  return ::fstat(fd, &facts) < 0 ? -errno : static_cast<int>(facts.st_nlink);
}

int System::fallocate(int fd, std::uint64_t bytes) {
  return or_errno(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
}

std::int64_t System::free_bytes(int fd) {
  struct statvfs facts{};
  if (::fstatvfs(fd, &facts) < 0) return -errno;
  return static_cast<std::int64_t>(facts.f_bavail) * static_cast<std::int64_t>(facts.f_frsize);
}

std::int64_t System::direct_alignment_bytes(int fd) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) < 0) return -errno;
  if ((facts.stx_mask & STATX_DIOALIGN) != 0) return std::max(facts.stx_dio_mem_align, facts.stx_dio_offset_align);
#else
  static_cast<void>(fd);
#endif
  return 0;
}

std::int64_t System::file_system_type(const char* directory) {
  struct statfs facts{};
  return ::statfs(directory, &facts) < 0 ? -errno : static_cast<std::uint32_t>(facts.f_type);
}

ssize_t System::pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  return or_errno(::pread(fd, memory, bytes, static_cast<off_t>(offset)));
}

ssize_t System::pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  return or_errno(::pwrite(fd, memory, bytes, static_cast<off_t>(offset)));
}

int System::ring_setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(or_errno(::syscall(__NR_io_uring_setup, entries, params)));
}

int System::ring_enter(int fd, unsigned submit_num, unsigned wait_num, unsigned flags) {
  return static_cast<int>(or_errno(::syscall(__NR_io_uring_enter, fd, submit_num, wait_num, flags, nullptr, 0)));
}

int System::ring_register(int fd, unsigned what, const void* argument, unsigned num) {
  return static_cast<int>(or_errno(::syscall(__NR_io_uring_register, fd, what, argument, num)));
}

void* System::ring_map(int fd, std::size_t bytes, std::uint64_t offset) {
  void* address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  return address == MAP_FAILED ? nullptr : address;
}

int System::ring_unmap(void* address, std::size_t bytes) { return or_errno(::munmap(address, bytes)); }

System& kernel_system() {
  static System system;
  return system;
}

void throw_io(int error_number, const std::string& what, const std::string& path) {
  throw IoError(error_number, what, path);
}

}  // namespace zb
