#include "memory/pinned_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>

#include "common/error.h"
#include "common/page.h"
#include "common/scope_exit.h"
#include "common/thread_pool.h"
#include "memory/host_limits.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace zb {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// Where transparent huge pages are switched off, MADV_COLLAPSE (Linux 6.1) may still make them.
bool huge_pages_are_off() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  return line.find("[never]") != std::string::npos;
}

void touch(std::byte* data, std::size_t bytes, std::size_t stride_bytes) {
  for (std::size_t at = 0; at < bytes; at += stride_bytes) *static_cast<volatile std::byte*>(data + at) = std::byte{0};
}

// Returns 0 or an errno.
int fill_piece(std::byte* data, std::size_t bytes, bool collapse) {
  const std::size_t whole_bytes = bytes / kHugePageBytes * kHugePageBytes;
  if (collapse && whole_bytes > 0) {
    touch(data, whole_bytes, kHugePageBytes);  // a huge page replaces its one small page, and the rest comes as zeros
    madvise(data, whole_bytes, MADV_COLLAPSE);
  }
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno == EINVAL) {  // Linux before 5.14
    touch(data, bytes, page_bytes());
    return 0;
  }
  return errno == EFAULT ? ENOMEM : errno;  // EFAULT is what would have been SIGBUS
}

}  // namespace

PinnedMapping::PinnedMapping(std::size_t bytes, const PinnedOptions& options) {
  if (bytes == 0) return;
  require_host_memory(bytes, options.what);
  if (options.lock == PageLock::kLocked) require_lockable(round_up_to_page(bytes), options.what);
  const auto begin = Clock::now();
  map(bytes, options.what);
  try {
    if (options.numa_node != kAnyNode) is_on_node_ = prefer_node(data_, bytes_, options.numa_node);
    fill(options);
    if (options.lock == PageLock::kLocked && mlock(data_, bytes_) != 0) {
      throw OutOfMemoryError(memory_text(bytes_) + " of " + options.what + " cannot be locked (" +
                             std::strerror(errno) + "); raise the limit of locked memory (`ulimit -l`) or do not lock");
    }
    fill_ms_ = ms_since(begin);
    if (options.registrar == nullptr) return;
    const auto filled = Clock::now();
    options.registrar->register_host(data_, bytes_);
    registrar_ = options.registrar;
    register_ms_ = ms_since(filled);
  } catch (...) {
    unmap();
    throw;
  }
}

PinnedMapping::~PinnedMapping() { unmap(); }

void PinnedMapping::map(std::size_t bytes, const std::string& what) {
  bytes_ = round_up_to_page(bytes);
  const std::size_t spare_bytes = bytes_ >= kHugePageBytes ? kHugePageBytes : 0;
  void* address =
      mmap(nullptr, bytes_ + spare_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw OutOfMemoryError(memory_text(bytes_) + " of " + what + " cannot be mapped (" + std::strerror(errno) +
                           "); raise the limit of the process's memory (`ulimit -v`, `ulimit -d`, --rank-memory-gib)");
  }
  data_ = static_cast<std::byte*>(address);
  if (spare_bytes > 0) {
    data_ = trim_to_huge_page(address, bytes_);
    madvise(data_, bytes_, MADV_HUGEPAGE);  // advice: a kernel without huge pages is no error
  }
  ZB_SYS(madvise(data_, bytes_, MADV_DONTFORK));
}

void PinnedMapping::fill(const PinnedOptions& options) {
  const bool collapse = bytes_ >= kHugePageBytes && huge_pages_are_off();
  std::atomic<int> failure{0};
  ThreadPool threads(options.thread_num, options.cpus);
  threads.parallel_for(bytes_, kHugePageBytes, [&](std::size_t begin, std::size_t end) {
    const int error_number = fill_piece(data_ + begin, end - begin, collapse);
    if (error_number != 0) failure = error_number;
  });
  if (failure == 0) return;
  throw OutOfMemoryError(memory_text(bytes_) + " of " + options.what + " could be mapped but not filled (" +
                         std::generic_category().message(failure) +
                         "); use more ranks or hosts, a smaller model, or offload less");
}

void PinnedMapping::unmap() noexcept {
  // A forked child does not have the mapping: what is there now is something else of its own.
  if (data_ == nullptr || !made_by_.is_current()) return;
  if (registrar_ != nullptr) registrar_->unregister_host(data_);
  munmap(data_, bytes_);
  data_ = nullptr;
}

// Neighbouring mappings of the same kind may share an entry of smaps; what is huge there is taken to be ours first.
std::size_t PinnedMapping::huge_bytes() const {
  const auto own_begin = reinterpret_cast<std::uintptr_t>(data_);
  std::ifstream file("/proc/self/smaps");
  std::size_t huge = 0;
  bool is_ours = false;
  for (std::string line; std::getline(file, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    std::size_t kilobytes = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      is_ours = begin < own_begin + bytes_ && own_begin < end;
    } else if (is_ours && std::sscanf(line.c_str(), "AnonHugePages: %zu", &kilobytes) == 1) {
      huge += kilobytes * 1024;
    }
  }
  return std::min(huge, bytes_);
}

}  // namespace zb
