#include "memory/pinned_pool.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "common/error.h"
#include "memory/host_limits.h"

namespace zb {

// The mapping and its gaps.
class PinnedSpace {
 public:
  PinnedSpace(std::size_t bytes, const PinnedOptions& options) : mapping_(bytes, options), what_(options.what) {
    if (mapping_.bytes() > 0) gaps_.emplace(0, Piece{mapping_.bytes()});
  }

  std::byte* take(std::size_t bytes, std::size_t alignment) {
    const std::lock_guard lock(mutex_);
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      const std::size_t gap_begin = gap->first;
      const std::size_t gap_end = gap_begin + gap->second.bytes;
      const std::size_t begin = PinnedPool::footprint_bytes(gap_begin, alignment);
      if (begin > gap_end || gap_end - begin < bytes) continue;
      // The last block of a pool may end inside its last line.
      const std::size_t end = std::min(PinnedPool::footprint_bytes(begin + bytes, alignment), gap_end);
      taken_.emplace(begin, Piece{end - begin, bytes});
      if (end < gap_end) gaps_.emplace(end, Piece{gap_end - end});
      if (begin > gap_begin) {
        gap->second.bytes = begin - gap_begin;
      } else {
        gaps_.erase(gap);
      }
      requested_bytes_ += bytes;
      peak_requested_bytes_ = std::max(peak_requested_bytes_, requested_bytes_);
      return mapping_.data() + begin;
    }
    throw OutOfMemoryError("the pool of " + what_ + " (" + memory_text(mapping_.bytes()) + ", " +
                           memory_text(requested_bytes_) + " in use) has no gap of " + memory_text(bytes) +
                           "; make the pool larger");
  }

  void give_back(std::byte* data) noexcept {
    const std::lock_guard lock(mutex_);
    auto node = taken_.extract(static_cast<std::size_t>(data - mapping_.data()));  // giving back must not allocate
    requested_bytes_ -= std::exchange(node.mapped().requested_bytes, 0);
    auto gap = gaps_.insert(std::move(node)).position;
    const auto next = std::next(gap);
    if (next != gaps_.end() && next->first == gap->first + gap->second.bytes) {
      gap->second.bytes += next->second.bytes;
      gaps_.erase(next);
    }
    if (gap == gaps_.begin()) return;
    const auto before = std::prev(gap);
    if (before->first + before->second.bytes != gap->first) return;
    before->second.bytes += gap->second.bytes;
    gaps_.erase(gap);
  }

  PinnedStats stats() const {
    PinnedStats stats{.mapped_bytes = mapping_.bytes(),
                      .huge_bytes = mapping_.huge_bytes(),
                      .is_on_node = mapping_.is_on_node(),
                      .is_registered = mapping_.is_registered(),
                      .fill_ms = mapping_.fill_ms(),
                      .register_ms = mapping_.register_ms()};
    const std::lock_guard lock(mutex_);
    stats.requested_bytes = requested_bytes_;
    stats.peak_requested_bytes = peak_requested_bytes_;
    return stats;
  }

 private:
  struct Piece {
    std::size_t bytes = 0;
    std::size_t requested_bytes = 0;
  };

  PinnedMapping mapping_;
  std::string what_;
  mutable std::mutex mutex_;
  std::map<std::size_t, Piece> gaps_;  // by where they begin; no two touch
  std::map<std::size_t, Piece> taken_;
  std::size_t requested_bytes_ = 0;
  std::size_t peak_requested_bytes_ = 0;
};

PinnedBlock::PinnedBlock(PinnedBlock&& other) noexcept
    : space_(std::move(other.space_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      allocation_(std::move(other.allocation_)) {}

PinnedBlock& PinnedBlock::operator=(PinnedBlock&& other) noexcept {
  if (this != &other) {
    release();
    space_ = std::move(other.space_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    allocation_ = std::move(other.allocation_);
  }
  return *this;
}

void PinnedBlock::release() noexcept {
  if (data_ == nullptr) return;
  space_->give_back(std::exchange(data_, nullptr));
  bytes_ = 0;
  allocation_ = Allocation();
  space_.reset();
}

PinnedPool::PinnedPool(std::size_t bytes, Ledger* ledger, const PinnedOptions& options)
    : space_(std::make_shared<PinnedSpace>(bytes, options)), ledger_(ledger) {}

PinnedBlock PinnedPool::allocate(std::size_t bytes, Category category, std::size_t alignment) {
  PinnedBlock block = allocate(bytes, alignment);
  block.allocation_ = Allocation(ledger_, Tier::kHost, category, bytes);
  return block;
}

PinnedBlock PinnedPool::allocate(std::size_t bytes, std::size_t alignment) {
  ZB_EXPECT(std::has_single_bit(alignment) && alignment <= kDirectAlignment,
            "blocks of pinned memory are aligned to a power of two up to " + std::to_string(kDirectAlignment) +
                ", not " + std::to_string(alignment));
  PinnedBlock block;
  if (bytes == 0) return block;
  block.data_ = space_->take(bytes, alignment);
  block.space_ = space_;
  block.bytes_ = bytes;
  return block;
}

PinnedStats PinnedPool::stats() const { return space_->stats(); }

}  // namespace zb
