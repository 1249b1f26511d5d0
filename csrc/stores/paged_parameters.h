// Low-precision shards of parameters in swap files: read ahead in the order in which they are gathered, written behind
// their updates.
//
// [Note: paged parameters]
// A chunk is up to chunk_numel elements of one shard. A step reads it for every gather (once in forward, once in
// backward) and writes it once, whole, without reading. The order of gathers between two steps is recorded and then
// read ahead by, so the first chunks of the next forward are on their way, or still in memory, when it begins. With
// ahead_bytes for a shard all of the next one comes while the last one is used, so whoever would prefetch it can see
// that it is there (is_read) and begin what lies at hand otherwise.
// Where all shards are frozen there are no steps: once a round has as many chunks as there are, it ends when its first
// chunk comes again.
// A chunk that is being copied to the device is retained until the copy has run; so are two at most, of shards that
// were fetched last. `fetch` and `begin_update` come from one thread, `write` from another; a shard is not fetched
// while it is written, and `release` is called before.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "io/pager.h"
#include "kernels/device.h"
#include "memory/ledger.h"
#include "stores/paged_state.h"

namespace zb {

struct ParameterShard {
  std::size_t numel = 0;
  DType dtype = DType::kFloat32;
  bool is_frozen = false;  // no update follows
};

// Host memory that they take, aligned to a page.
std::size_t paged_parameters_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                   const PagedStateOptions& options);
// With all chunks in memory.
std::size_t most_paged_parameters_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                        const PagedStateOptions& options);

// Of them, what lies in files.
std::size_t swapped_parameters_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                     const PagedStateOptions& options);

// What holds the largest shard, as PagedStateOptions::ahead_bytes.
std::size_t largest_paged_shard_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                      const PagedStateOptions& options);

class PagedParameters {
 public:
  // `memory`: paged_parameters_bytes, page aligned and known to the device; it outlives this, and is counted by who
  // gave it. The ledger counts what lies in files. Throws IoError where the paths do not serve.
  PagedParameters(std::span<const ParameterShard> shards, std::size_t chunk_numel, const PagedStateOptions& options,
                  std::span<std::byte> memory, std::shared_ptr<Device> device, Ledger* ledger,
                  System& system = kernel_system());
  ~PagedParameters();

  // Puts the copy of a chunk from host memory into a lane, and returns a mark behind it.
  using Copy = std::function<MarkPtr(std::size_t offset_bytes, std::span<const std::byte> chunk)>;
  // Every chunk of the shard, in order. Blocks for what is not yet read.
  void fetch(std::size_t shard, const Copy& copy);
  // Whether a fetch would wait for no read but of what finds no place ahead of its use.
  bool is_read(std::size_t shard) const;
  // An update of the shard follows on all fetches so far: shards that come again begin another step.
  void begin_update(std::size_t shard);

  // Lets go of the shard's chunks, whose copies have run.
  void release(std::size_t shard);
  // `fill` gets the chunk that begins at this element and writes all of it.
  void write(std::size_t shard, std::size_t begin, const std::function<void(std::byte* chunk)>& fill);

  void flush() { pager_.flush(); }  // returns when nothing is in flight
  PagerStats stats() const { return pager_.stats(); }
  std::string_view engine() const { return io_engine_name(engine_->kind()); }
  std::vector<std::string> notes() const;  // what runs otherwise than asked for

 private:
  struct Retained {
    std::size_t shard;
    std::size_t chunk;
    MarkPtr copied;
  };

  std::size_t end_chunk(std::size_t shard) const {
    return shard + 1 < first_chunk_.size() ? first_chunk_[shard + 1] : chunk_bytes_.size();
  }
  void record(std::size_t chunk);
  void end_round();

  std::vector<ParameterShard> shards_;
  std::vector<std::size_t> first_chunk_;  // by shard
  std::size_t chunk_numel_;
  std::vector<std::size_t> chunk_bytes_;
  PagerPlan plan_;
  SwapSpace space_;
  std::unique_ptr<IoEngine> engine_;
  Pager pager_;
  std::shared_ptr<Device> device_;
  Allocation counted_;
  std::mutex mutex_;
  std::deque<Retained> retained_;
  std::vector<std::size_t> order_;
  std::vector<std::size_t> round_;
  std::vector<bool> is_updated_;  // by shard, in this round
  bool are_all_frozen_;
};

}  // namespace zb
