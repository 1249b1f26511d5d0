// Where the optimizer state of a store on the host lies between updates: resident in pinned memory, or elsewhere and
// brought there in chunks.
//
// A store borrows a chunk, works on it in host memory and gives it back. Chunks of one shard are borrowed in order,
// from one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/pinned_pool.h"

namespace zb {

// Master, exp_avg and exp_avg_sq of elements [begin, end) of a shard.
struct StateChunk {
  float* master = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
};

enum class ChunkUse : std::uint8_t { kRead, kWritten };

class StateSpace {
 public:
  virtual ~StateSpace() = default;
  // A new shard of zeros; shards count from 0.
  virtual void add_shard(std::size_t numel) = 0;
  virtual StateChunk borrow(std::size_t shard, std::size_t begin, std::size_t end) = 0;  // may block
  virtual void give_back(std::size_t shard, std::size_t begin, std::size_t end, ChunkUse use) = 0;
};

// All of it in the pool, from which add_shard takes resident_state_bytes(numel).
std::unique_ptr<StateSpace> make_resident_state(std::shared_ptr<PinnedPool> pool);
std::size_t resident_state_bytes(std::size_t numel);

}  // namespace zb
