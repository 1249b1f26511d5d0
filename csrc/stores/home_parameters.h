// Shards of parameters whose home is a host store, in pinned memory or in files: fetched for each gather, written by
// updates.
//
// fetch and take_fetches come from the caller's thread, end_fetches and write from the store's; a shard is not fetched
// while it is written.
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/timeline.h"
#include "memory/pinned_pool.h"
#include "stores/host_link.h"
#include "stores/host_store.h"
#include "stores/paged_parameters.h"

namespace zb {

class HomeParameters {
 public:
  // By lane: behind which what a shard's fetches read may be written again.
  using Fetches = std::array<MarkPtr, kLaneNum>;
  // Fills a chunk of a shard's parameters.
  using Fill = std::function<void(std::byte* chunk)>;

  // For exactly these shards, added in this order, in memory of the pool.
  HomeParameters(const HostStoreOptions& options, std::span<const ShardSpec> shards, PinnedPool& pool,
                 std::shared_ptr<Device> device, HostLink& link, Ledger* ledger);

  void add_shard(const ShardSpec& spec);
  void set_timeline(Timeline* timeline) { timeline_ = timeline; }

  // The shard as it was last written, in this lane. Blocks for files that are not yet read; an error of them is as
  // final as one of the updates.
  void fetch(std::size_t shard, Lane lane, void* destination);
  // Whether a fetch would find what is read ahead of it.
  bool is_read(std::size_t shard) const { return !paged_ || paged_->is_read(shard); }
  // An update of the shard follows on all fetches so far.
  void begin_update(std::size_t shard);
  Fetches take_fetches(std::size_t shard) { return std::exchange(shards_.at(shard).fetches, {}); }

  // Before writes: what was fetched has been read.
  void end_fetches(std::size_t shard, const Fetches& fetches);
  void write(std::size_t shard, std::size_t begin, const Fill& fill);

  std::exception_ptr failure() const { return failure_; }
  double waited_ms() const { return waited_ms_; }  // for files, in fetches
  void flush() {
    if (paged_) paged_->flush();
  }
  PagerStats stats() const { return paged_ ? paged_->stats() : PagerStats{}; }
  // What moves the files; empty without any.
  std::string_view engine() const { return paged_ ? paged_->engine() : std::string_view(); }
  // What runs otherwise than asked for.
  std::vector<std::string> notes() const { return paged_ ? paged_->notes() : std::vector<std::string>{}; }

 private:
  struct Shard {
    DType dtype;
    std::string unit;
    PinnedBlock memory;  // empty where it lies in files
    Fetches fetches;
  };

  void fetch_from_files(std::size_t shard, Lane lane, std::byte* destination);

  std::shared_ptr<Device> device_;
  HostLink& link_;
  PinnedPool& pool_;
  Timeline* timeline_ = nullptr;
  std::exception_ptr failure_;
  double waited_ms_ = 0.0;
  PinnedBlock frames_;
  std::unique_ptr<PagedParameters> paged_;  // null where the home is memory
  std::vector<Shard> shards_;
};

}  // namespace zb
