#include "io/swap_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "common/blocked_signals.h"
#include "common/error.h"
#include "memory/host_limits.h"

namespace zb {
namespace {

constexpr std::string_view kPrefix = "zerobench-swap.";
constexpr std::string_view kSuffix = ".tmp";
constexpr std::size_t kLeastAlignmentBytes = 4096;
constexpr int kCreateAttempts = 100;
constexpr std::chrono::seconds kRingPatience{5};
constexpr std::chrono::milliseconds kRingTurn{5};

// Letters, digits, - and _ of a text: what may stand between the dots of a name.
std::string word(std::string text) {
  std::erase_if(text, [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; });
  return text;
}

std::string host_word() {
  std::array<char, 256> name{};
  static_cast<void>(gethostname(name.data(), name.size() - 1));
  return word(name.data());
}

// zerobench-swap.HOST.OWNER.PID.NUMBER-ATTEMPT.tmp
std::string name_of(const std::string& owner, int attempt) {
  static std::atomic<int> number{0};
  std::string name(kPrefix);
  name.append(host_word()).append(".").append(word(owner)).append(".pid").append(std::to_string(getpid()));
  name.append(".").append(std::to_string(number++)).append("-").append(std::to_string(attempt));
  return name.append(kSuffix);
}

bool is_swap_name(std::string_view name) {
  return name.starts_with(kPrefix) && name.ends_with(kSuffix) && name.size() > kPrefix.size() + kSuffix.size();
}

bool is_of_this_host(std::string_view name) {
  const std::string host = host_word() + ".";
  return name.substr(kPrefix.size()).starts_with(host);
}

bool is_local_file_system(const std::string& directory, System& system) {
  constexpr std::array<std::int64_t, 7> kLocal{0xEF53,     0x58465342, 0x9123683E, 0x01021994,
                                               0x794C7630, 0x2FC12FC1, 0xF2F52010};  // ext, xfs, btrfs, tmpfs,
                                                                                     // overlay, zfs, f2fs
  return std::ranges::find(kLocal, system.file_system_type(directory.c_str())) != kLocal.end();
}

// As this process sees it: one in another container may live.
bool is_owner_gone(std::string_view name) {
  const std::size_t at = name.find(".pid");
  const pid_t process = at == std::string_view::npos ? 0 : std::atoi(name.data() + at + 4);
  return is_of_this_host(name) && process > 0 && ::kill(process, 0) != 0 && errno == ESRCH;
}

// The kernel lets go of the files of a dead process's ring some time after the process has ended. Their space may be
// what the caller needs.
bool remove_if_stale(const std::filesystem::path& path, System& system,
                     std::chrono::steady_clock::time_point deadline) {
  const int fd = system.open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0);
  if (fd < 0) return false;  // gone meanwhile, or not ours to open
  const auto lock = [&] { return system.flock(fd, LOCK_EX | LOCK_NB) == 0; };
  bool stale = lock();
  while (!stale && is_owner_gone(path.filename().native()) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kRingTurn);
    stale = lock();
  }
  const bool removed = stale && system.unlink(path.c_str()) == 0;
  system.close(fd);
  return removed;
}

}  // namespace

std::size_t remove_stale_swap_files(const std::string& directory, System& system) {
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (is_swap_name(it->path().filename().string())) found.push_back(it->path());
  }
  const bool local = is_local_file_system(directory, system);
  const auto deadline = std::chrono::steady_clock::now() + kRingPatience;
  std::size_t removed_num = 0;
  for (const std::filesystem::path& path : found) {
    if (!local && !is_of_this_host(path.filename().string())) continue;
    removed_num += remove_if_stale(path, system, deadline) ? 1 : 0;
  }
  return removed_num;
}

SwapFile::SwapFile(const SwapFileSpec& spec, System& system) : system_(system) {
  remove_stale_swap_files(spec.directory, system_);
  const BlockedSignals blocked;  // tmpfs ends a reservation where one comes, such as a data loader's SIGCHLD
  try {
    int attempt = 0;
    while (!create(spec, attempt)) {
      if (++attempt == kCreateAttempts) throw_io(EEXIST, "no swap file could be made in " + spec.directory, {});
    }
    alignment_bytes_ = std::max(
        kLeastAlignmentBytes, static_cast<std::size_t>(std::max<std::int64_t>(0, system_.direct_alignment_bytes(fd_))));
    reserve(spec);
  } catch (...) {
    remove();
    throw;
  }
}

SwapFile::SwapFile(SwapFile&& other) noexcept
    : system_(other.system_),
      fd_(std::exchange(other.fd_, -1)),
      made_by_(other.made_by_),
      path_(std::move(other.path_)),
      note_(std::move(other.note_)),
      direct_(other.direct_),
      alignment_bytes_(other.alignment_bytes_) {}

SwapFile::~SwapFile() { remove(); }

void SwapFile::remove() noexcept {
  if (fd_ < 0) return;
  if (made_by_.is_current()) system_.unlink(path_.c_str());
  system_.close(std::exchange(fd_, -1));
}

int SwapFile::open_new(const SwapFileSpec& spec) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  direct_ = spec.direct;
  int fd = system_.open(path_.c_str(), kFlags | (direct_ ? O_DIRECT : 0), 0600);
  if (fd != -EINVAL || !direct_) return fd;
  system_.unlink(path_.c_str());  // some file systems refuse after they made the file
  const std::string why = spec.directory + " refuses O_DIRECT";
  if (!spec.allow_fallback)
    throw_io(EINVAL, why + "; choose another path or allow the fallback to buffered I/O (io_allow_fallback)",
             spec.directory);
  note_ = "buffered I/O: " + why;
  direct_ = false;
  fd = system_.open(path_.c_str(), kFlags, 0600);
  return fd;
}

// False where the name was taken, or where a run that cleans up removed the file before it was locked.
bool SwapFile::create(const SwapFileSpec& spec, int attempt) {
  path_ = (std::filesystem::path(spec.directory) / name_of(spec.owner, attempt)).string();
  const int fd = open_new(spec);
  if (fd == -EEXIST) return false;
  if (fd < 0) {
    throw_io(-fd, "no swap file can be made in " + spec.directory + "; give a directory that exists and is writable",
             spec.directory);
  }
  fd_ = fd;
  if (const int result = system_.flock(fd_, LOCK_EX); result < 0) {
    throw_io(-result, path_ + " cannot be locked; choose a path that supports flock", path_);
  }
  if (system_.link_num(fd_) > 0) return true;
  system_.close(std::exchange(fd_, -1));
  return false;
}

void SwapFile::reserve(const SwapFileSpec& spec) {
  const std::int64_t free_bytes = system_.free_bytes(fd_);
  const bool fits = free_bytes < 0 || static_cast<std::uint64_t>(free_bytes) >= spec.bytes;
  const int result = fits ? (spec.bytes > 0 ? system_.fallocate(fd_, spec.bytes) : 0) : -ENOSPC;
  if (result >= 0) return;
  if (result == -ENOSPC || result == -EDQUOT) {
    // A reservation that failed half way holds what it got; the figure is that of before.
    const auto had = static_cast<std::uint64_t>(std::max<std::int64_t>(0, free_bytes));
    const std::string missing =
        had < spec.bytes ? memory_text(spec.bytes - had) + " too little" : "taken meanwhile, or a quota";
    throw_io(-result,
             spec.directory + " has not enough space for the swap file of " + spec.owner + ": " +
                 memory_text(spec.bytes) + " are needed and " + memory_text(had) + " are free (" + missing +
                 "); free some or give another path",
             spec.directory);
  }
  if (result == -EFBIG) {
    throw_io(EFBIG,
             spec.directory + " cannot hold a swap file of " + memory_text(spec.bytes) + " for " + spec.owner +
                 "; raise the limit on the size of files (ulimit -f), or give several paths",
             spec.directory);
  }
  throw_io(-result,
           spec.directory + " cannot reserve " + memory_text(spec.bytes) + "; choose a file system with fallocate",
           spec.directory);
}

}  // namespace zb
