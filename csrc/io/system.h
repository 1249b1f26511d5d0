// The system calls of this folder, so that tests can make any of them fail; the class itself is the kernel.
//
// Each call returns what the kernel does: a value, or -errno. Thread-safe.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

struct io_uring_params;

namespace zb {

class System {
 public:
  virtual ~System() = default;

  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual int unlink(const char* path);
  virtual int flock(int fd, int operation);
  virtual int link_num(int fd);  // names that the file has
  virtual int fallocate(int fd, std::uint64_t bytes);
  virtual std::int64_t free_bytes(int fd);  // for this user, on the file's file system
  virtual std::int64_t direct_alignment_bytes(
      int fd);  // of offsets and memory for O_DIRECT; 0 where the kernel is silent
  virtual std::int64_t file_system_type(const char* directory);  // statfs(2)'s f_type
  virtual ssize_t pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset);
  virtual ssize_t pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset);

  virtual int ring_setup(unsigned entries, io_uring_params* params);
  virtual int ring_enter(int fd, unsigned submit_num, unsigned wait_num, unsigned flags);
  virtual int ring_register(int fd, unsigned what, const void* argument, unsigned num);
  virtual void* ring_map(int fd, std::size_t bytes, std::uint64_t offset);  // null with errno set
  virtual int ring_unmap(void* address, std::size_t bytes);
};

System& kernel_system();

// "what: text of the error", as IoError with the path.
[[noreturn]] void throw_io(int error_number, const std::string& what, const std::string& path);

}  // namespace zb
