// Operations of the shm communicator and how far each can go without blocking. See [Note: protocol].
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/shm_control.h"
#include "comm/shm_memory.h"
#include "comm/shm_peers.h"

namespace zb::shm {

inline constexpr std::size_t kHalfNum = 2;  // of a piece; see [Note: halves]

struct Operation {
  // What was asked for.
  Descriptor descriptor;
  std::string_view label;
  std::shared_ptr<Buffer> source;  // that peers read; null for exchange and barrier
  std::shared_ptr<RegisteredBuffer> destination_owner;
  std::byte* destination = nullptr;
  std::size_t numel = 0;               // of a shard; of the buffer for all_reduce
  std::span<const std::byte> message;  // of an exchange: this rank's, and room for that of all
  std::byte* messages = nullptr;       // null once nobody waits for them any more
  std::size_t message_stride_bytes = 0;
  std::size_t payload_index = 0;
  // How far it is.
  std::uint64_t sequence = 0;
  std::bitset<kMaxRanks> taken;                                // ranks whose part is here
  bool is_reduced = false;                                     // of an all_reduce: the own piece
  std::array<std::bitset<kMaxRanks>, kHalfNum> copied_halves;  // of an all_reduce: of the peers' pieces
  bool is_done = false;
};

// Whether it reads peers' buffers. What others need has been copied into the control block when it is posted.
bool moves_data(const Operation& operation) noexcept;

// Whether running `earlier` writes what peers read for `later` on this rank.
bool writes_source_of(const Operation& earlier, const Operation& later, int rank, int world_size) noexcept;

// "all_gather of 'h.3'", from this rank's own full label or from a peer's descriptor.
std::string describe(const Operation& operation);
std::string describe(const Descriptor& descriptor);

// Runs operations as far as peers are ready. Reads peers' memory where it lies.
class Runner {
 public:
  explicit Runner(Peers& peers) : peers_(peers) {}

  // Puts what peers need into this rank's block; the caller publishes.
  void prepare(Operation& operation);
  // True once the destination is readable. Throws (and poisons) when a peer called something else.
  bool step(Operation& operation);
  // Whether the operation cannot end before this peer has published more.
  bool awaits(const Operation& operation, int peer) noexcept;
  // What to sleep for; see RankBlock::interest.
  std::uint32_t interest(const Operation& operation) noexcept;
  // Grows with every piece of work done.
  std::uint64_t step_num() const noexcept { return step_num_; }

 private:
  bool all_gather(Operation& operation);
  bool reduce_scatter(Operation& operation);
  bool all_reduce(Operation& operation);
  std::byte* reduced_data(const Operation& operation, int peer, std::size_t begin_numel) noexcept;
  void reduce_own(const Operation& operation, std::size_t half);
  bool copy_reduced(Operation& operation, int peer, std::size_t half);
  bool broadcast(Operation& operation);
  bool exchange(Operation& operation);
  bool barrier(Operation& operation);

  bool all_posted(const Operation& operation);
  bool take(Operation& operation, int peer, Counter counter);
  const Descriptor& descriptor_of(std::uint64_t sequence, int peer) noexcept;
  bool stands(std::uint64_t sequence, int rank) noexcept;
  void match(const Operation& operation, int peer);
  [[noreturn]] void fail_mismatch(std::uint64_t sequence, int peer);

  Peers& peers_;
  std::uint64_t step_num_ = 0;
  std::uint32_t history_ = 0;  // of the operations prepared so far
};

// Values of RankBlock::interest.
constexpr std::uint32_t interest_in(Counter counter, std::uint32_t rank_or_any) noexcept {
  return static_cast<std::uint32_t>(counter) << 16 | rank_or_any;
}
inline constexpr std::uint32_t kInterestInAll = interest_in(Counter::kPosted, kAnyRank) |
                                                interest_in(Counter::kReduced, kAnyRank) |
                                                interest_in(Counter::kCompleted, kAnyRank);

}  // namespace zb::shm
