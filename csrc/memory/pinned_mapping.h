// One exact mapping of host memory, every page in place, pinned for a device or locked.
//
// [Note: pinned memory]
// A power-of-two pool (torch's pin_memory) doubles what a large model needs, and cudaHostAlloc fills its pages with one
// thread. Here many threads fill the pages of an exact mapping, huge pages where the kernel has them, and the device's
// driver only looks them up. The mapping is no part of a forked child: the kernel would copy every pinned page for it.
// Limits are checked before anything is mapped (host_limits.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/process_owned.h"
#include "memory/numa.h"

namespace zb {

// Makes host memory known to a device, so that copies need neither a detour nor the host.
class HostRegistrar {
 public:
  virtual ~HostRegistrar() = default;
  virtual void register_host(std::byte* data, std::size_t bytes) = 0;  // throws where the device refuses
  virtual void unregister_host(std::byte* data) noexcept = 0;
};

enum class PageLock : std::uint8_t { kNone, kLocked };  // kLocked: mlock, which RLIMIT_MEMLOCK limits

struct PinnedOptions {
  std::size_t thread_num = 1;  // that fill pages
  std::vector<int> cpus = {};  // as ThreadPool takes them
  int numa_node = kAnyNode;
  PageLock lock = PageLock::kNone;                     // a registrar pins without it
  std::shared_ptr<HostRegistrar> registrar = nullptr;  // null: no device
  std::string what = "pinned memory";                  // in errors
};

class PinnedMapping {
 public:
  // Zero-filled, rounded up to a page, from 2 MiB up on a huge-page boundary. Throws OutOfMemoryError.
  PinnedMapping(std::size_t bytes, const PinnedOptions& options);
  ~PinnedMapping();
  PinnedMapping(const PinnedMapping&) = delete;
  PinnedMapping& operator=(const PinnedMapping&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }  // mapped
  std::size_t huge_bytes() const;                        // of them in huge pages, as the kernel tells
  bool is_on_node() const noexcept { return is_on_node_; }
  bool is_registered() const noexcept { return registrar_ != nullptr; }
  double fill_ms() const noexcept { return fill_ms_; }
  double register_ms() const noexcept { return register_ms_; }

 private:
  void map(std::size_t bytes, const std::string& what);
  void fill(const PinnedOptions& options);
  void unmap() noexcept;

  MakingProcess made_by_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool is_on_node_ = false;  // the kernel took the wish for a node
  std::shared_ptr<HostRegistrar> registrar_;
  double fill_ms_ = 0.0;
  double register_ms_ = 0.0;
};

}  // namespace zb
