// The control block that all ranks of a shm communicator map: counters, descriptors of operations, small payloads.
//
// [Note: protocol] Operations are numbered from 0, the same on all ranks. Each rank writes only its own RankBlock
// (doorbells apart) and reads those of its peers:
// - `posted` > s: the descriptor of operation s stands in ring[s % kRingDepth], and this rank's source may be read.
// - `reduced` > 2 s + h: half h of this rank's piece of all_reduce s is summed in place and may be copied by peers.
// - `completed` > s: this rank has finished operation s and reads no peer's memory for it any more.
// A ring slot is written again only when all peers have completed the operation that it held. Counters are stored and
// checked in sequentially consistent order with `interest` (set before the last check of a rank that goes to sleep,
// read after each store), so a wake-up is never lost and a futex call is made only for a rank that sleeps.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"

namespace zb::shm {

inline constexpr std::uint32_t kProtocolVersion = 3;
inline constexpr std::uint64_t kRingDepth = 256;
inline constexpr std::size_t kLabelBytes = 48;
inline constexpr std::size_t kInlineBytes = 32;
inline constexpr std::size_t kPayloadBytes = 64 * 1024;
inline constexpr std::size_t kPayloadNum = 4;
inline constexpr std::size_t kReasonBytes = 1024;
inline constexpr std::size_t kStopBytes = 256;
inline constexpr int kMaxRanks = 250;  // file descriptors of all ranks pass in one message (at most 253)

// The values of Collective, then what only this communicator knows.
enum class OperationKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kExchange,
  kBarrier,
  kAllocate,
};

struct alignas(64) Descriptor {
  // Equal on all ranks.
  OperationKind kind{};
  DType dtype{};
  std::uint16_t root = 0;
  // Hash of all earlier operations: one that needs no peer is checked by later ones.
  std::uint32_t history = 0;
  std::uint64_t bytes = 0;      // of a shard, of the buffer, of a message, of an allocation
  std::uint64_t buffer_id = 0;  // of the source
  // Of this rank.
  std::uint64_t offset_bytes = 0;
  std::array<std::byte, kInlineBytes> payload{};  // of an exchange that fits
  std::array<char, kLabelBytes> label{};
};

enum class Counter : std::uint32_t { kPosted = 1, kReduced = 2, kCompleted = 4 };

struct RankBlock {
  alignas(64) std::atomic<std::uint64_t> posted;
  std::atomic<std::uint64_t> reduced;
  std::atomic<std::uint64_t> completed;
  // The futex word, and what its owner sleeps for: 0, or Counter bits << 16 | (rank + 1, or kAnyRank).
  alignas(64) std::atomic<std::uint32_t> doorbell;
  std::atomic<std::uint32_t> interest;
  alignas(64) std::atomic<std::uint32_t> left;  // set when the owner closed its communicator
  std::int32_t fault_rank;                      // these two are valid when `poisoner` names the owner
  std::array<char, kReasonBytes> reason;
  // Communicator::stop. When, by the host's steady clock, or 0 while the owner takes part; `why` is valid while that
  // stays the same.
  alignas(64) std::atomic<std::int64_t> stopped_at;
  std::atomic<std::uint32_t> stop_num;
  std::array<std::atomic<char>, kStopBytes> why;
  std::atomic<std::uint64_t> put_in_num;  // Communicator::tell_put_in
  alignas(64) std::array<Descriptor, kRingDepth> ring;
  // Of the exchanges that a rank has started at most two are unfinished, and it has finished none that a peer has not
  // started, so when one starts, all ranks have finished the one four before.
  alignas(4096) std::array<std::array<std::byte, kPayloadBytes>, kPayloadNum> payload;
};

inline constexpr std::uint32_t kAnyRank = 0xffff;

struct alignas(4096) ControlBlock {
  std::atomic<std::uint32_t> poisoner;  // 0, or 1 + the rank whose `reason` is the original cause

  // The ranks' blocks follow this header.
  RankBlock& rank(int index) noexcept { return reinterpret_cast<RankBlock*>(this + 1)[index]; }
  static std::size_t bytes(int world_size) noexcept {
    return sizeof(ControlBlock) + sizeof(RankBlock) * static_cast<std::size_t>(world_size);
  }
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "ranks are processes: atomics must not rest on a lock of one of them");
static_assert(sizeof(Descriptor) == 128);

}  // namespace zb::shm
