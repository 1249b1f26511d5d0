// The flags of [Note: meetings] (peer_link.h): a row for each rank in memory that all ranks see, a word in it for each
// peer. A rank's row is written by the peers' lanes and watched by its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zb {

class PeerFlags {
 public:
  // Far above any number of meetings, and far from where a cyclic comparison turns around.
  static constexpr std::uint64_t kReleased = std::uint64_t{1} << 62U;
  static constexpr std::size_t kWordStrideBytes = 64;  // words that different peers write lie in different cache lines

  static std::size_t row_bytes(int world_size) noexcept {
    return static_cast<std::size_t>(world_size) * kWordStrideBytes;
  }

  // `rows` by rank, zero-filled once.
  PeerFlags(int rank, std::vector<std::byte*> rows) : rank_(rank), rows_(std::move(rows)) {}

  static std::size_t offset_of(int from) noexcept { return static_cast<std::size_t>(from) * kWordStrideBytes; }
  // The word that `from` writes and `to` watches.
  std::uint64_t& word(int to, int from) const noexcept {
    return *reinterpret_cast<std::uint64_t*>(rows_[static_cast<std::size_t>(to)] + offset_of(from));
  }
  // The same of a lane that is the host's.
  void raise(int to, std::uint64_t meeting) const noexcept {
    std::atomic_ref(word(to, rank_)).store(meeting, std::memory_order_release);
  }
  bool is_up(int from, std::uint64_t meeting) const noexcept {
    return std::atomic_ref(word(rank_, from)).load(std::memory_order_acquire) >= meeting;
  }
  // Raises every flag that this rank watches. A peer's lane may still overwrite one.
  void release() const noexcept {
    for (int from = 0; from < static_cast<int>(rows_.size()); ++from) {
      std::atomic_ref(word(rank_, from)).store(kReleased, std::memory_order_release);
    }
  }

 private:
  int rank_;
  std::vector<std::byte*> rows_;
};

}  // namespace zb
