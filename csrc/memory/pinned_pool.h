// Blocks of pinned host memory out of one exact mapping (see [Note: pinned memory] in pinned_mapping.h).
//
// Thread-safe. The ledger counts the bytes asked for, by category, on the host tier; `stats` says what lies under them.
#pragma once

#include <cstddef>
#include <memory>

#include "common/round_up.h"
#include "memory/ledger.h"
#include "memory/pinned_mapping.h"

namespace zb {

class PinnedSpace;

// A piece of a pool, given back at its end. It keeps the mapping, so it may outlive the pool object.
class PinnedBlock {
 public:
  PinnedBlock() = default;  // empty
  PinnedBlock(PinnedBlock&& other) noexcept;
  PinnedBlock& operator=(PinnedBlock&& other) noexcept;
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  ~PinnedBlock() { release(); }

  std::byte* data() const noexcept { return data_; }  // null when empty
  std::size_t bytes() const noexcept { return bytes_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

 private:
  friend class PinnedPool;
  void release() noexcept;

  std::shared_ptr<PinnedSpace> space_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Allocation allocation_;
};

struct PinnedStats {
  std::size_t mapped_bytes = 0;
  std::size_t requested_bytes = 0;       // of the blocks alive
  std::size_t peak_requested_bytes = 0;  // the largest sum so far
  std::size_t huge_bytes = 0;            // of the mapping, in huge pages
  bool is_on_node = false;               // the kernel took the wish for a node
  bool is_registered = false;
  double fill_ms = 0.0;  // mapping and filling
  double register_ms = 0.0;
};

class PinnedPool {
 public:
  static constexpr std::size_t kDirectAlignment = 4096;  // what O_DIRECT asks of addresses
  static constexpr std::size_t kLineAlignment = 64;      // what vector loops like

  // Holds `bytes`, rounded up to a page and no more. `ledger` may be null. Throws OutOfMemoryError.
  PinnedPool(std::size_t bytes, Ledger* ledger, const PinnedOptions& options);

  // What a block takes of a pool, for sums made before.
  static constexpr std::size_t footprint_bytes(std::size_t bytes, std::size_t alignment = kDirectAlignment) {
    return round_up(bytes, alignment);
  }

  // The first gap that is large enough. `alignment` is a power of two up to a page. Zeros, where no block was before.
  // Throws OutOfMemoryError.
  PinnedBlock allocate(std::size_t bytes, Category category, std::size_t alignment = kDirectAlignment);
  // The same for who counts it himself.
  PinnedBlock allocate(std::size_t bytes, std::size_t alignment = kDirectAlignment);

  PinnedStats stats() const;

 private:
  std::shared_ptr<PinnedSpace> space_;
  Ledger* ledger_;
};

}  // namespace zb
