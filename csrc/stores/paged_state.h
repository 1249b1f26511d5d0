// Optimizer state in swap files: its chunks come to host memory for an update and go back, the next ones on their way.
//
// [Note: paged state]
// A chunk is master, exp_avg and exp_avg_sq of up to chunk_numel elements of one shard, so an update reads once and
// writes once. As many chunks as the budget holds stay in memory for good. The order in which chunks are borrowed is
// recorded from one repetition to the next and then read ahead by; a change of it costs one round without.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/io_engine.h"
#include "io/pager.h"
#include "memory/ledger.h"
#include "stores/state_space.h"

namespace zb {

// What a thread of the I/O engine tells when it is over.
struct StateTransfer {
  Direction direction = Direction::kRead;
  std::size_t shard = 0;
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
};

struct PagedStateOptions {
  std::vector<std::string> directories;  // several are striped
  std::string owner = "rank0";           // a word, part of the files' names
  IoEngineOptions engine = {};
  bool direct = true;              // O_DIRECT; refused: an error, or with engine.allow_fallback buffered
  std::size_t resident_bytes = 0;  // of host memory, for chunks that never swap
  bool checksums = false;
  std::function<void(const StateTransfer&)> on_transfer = {};  // must not throw
  std::size_t ahead_bytes = 0;  // of host memory, for parameters that are read ahead beyond the engine's depth
};

class PagedState : public StateSpace {
 public:
  virtual void flush() = 0;  // returns when no transfer is in flight, of what is read ahead either
  virtual PagerStats stats() const = 0;
  virtual std::size_t swapped_bytes() const = 0;       // that lie in files
  virtual std::string_view engine() const = 0;         // its name
  virtual std::vector<std::string> notes() const = 0;  // what runs otherwise than asked for
};

// Host memory that the state of these shards takes, aligned to a page.
std::size_t paged_state_bytes(std::span<const std::size_t> shard_numels, std::size_t chunk_numel,
                              const PagedStateOptions& options);

// Of their states, what lies in files.
std::size_t swapped_state_bytes(std::span<const std::size_t> shard_numels, std::size_t chunk_numel,
                                const PagedStateOptions& options);

// For exactly these shards, added in this order. `memory`: paged_state_bytes, page aligned; it outlives the state. The
// ledger counts memory and files by category, each to the last byte: states where they lie for good, the rest staging.
// Throws IoError where the paths do not serve.
std::unique_ptr<PagedState> make_paged_state(std::span<const std::size_t> shard_numels, std::size_t chunk_numel,
                                             const PagedStateOptions& options, std::span<std::byte> memory,
                                             Ledger* ledger, System& system = kernel_system());

}  // namespace zb
