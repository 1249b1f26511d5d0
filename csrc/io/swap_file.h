// One temporary file, reserved on disk before use and held by a lock while its process lives.
//
// Its name tells whose it is. The destructor removes it; after a crash the next remove_stale_swap_files on its
// directory does, since the lock is free then. Files whose lock is held are never touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/process_owned.h"
#include "io/system.h"

namespace zb {

struct SwapFileSpec {
  std::string directory;
  std::string owner;  // a word such as rank0, part of the name
  std::uint64_t bytes = 0;
  bool direct = true;           // O_DIRECT
  bool allow_fallback = false;  // O_DIRECT refused: through the page cache instead, and note() says so
};

class SwapFile {
 public:
  // Removes stale files of the directory first. Throws IoError: no such directory, not writable, not enough space
  // (with what is missing), O_DIRECT refused.
  explicit SwapFile(const SwapFileSpec& spec, System& system = kernel_system());
  SwapFile(SwapFile&& other) noexcept;
  SwapFile& operator=(SwapFile&&) = delete;
  ~SwapFile();

  int fd() const noexcept { return fd_; }
  const std::string& path() const noexcept { return path_; }
  bool direct() const noexcept { return direct_; }
  std::size_t alignment_bytes() const noexcept { return alignment_bytes_; }
  const std::string& note() const noexcept { return note_; }

 private:
  bool create(const SwapFileSpec& spec, int attempt);
  int open_new(const SwapFileSpec& spec);
  void reserve(const SwapFileSpec& spec);
  void remove() noexcept;

  System& system_;
  int fd_ = -1;
  MakingProcess made_by_;  // a forked child removes nothing
  std::string path_;
  std::string note_;
  bool direct_ = true;
  std::size_t alignment_bytes_ = 0;
};

// Removes swap files that a crash left in the directory; returns how many. A file of another host is left alone on
// file systems that several hosts share, since locks there need not be seen by all.
std::size_t remove_stale_swap_files(const std::string& directory, System& system = kernel_system());

}  // namespace zb
