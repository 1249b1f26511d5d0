// The PeerLink of ranks whose devices are SimDevices: memory and flags are this process's, meetings work in the lanes.
// What a copy reads at a peer is what lies there when the copy runs.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/memory_overhead.h"
#include "comm/peer_flags.h"
#include "comm/peer_link.h"
#include "comm/peer_transport.h"
#include "common/page.h"
#include "sim/sim_device.h"
#include "sim/sim_memory.h"

namespace zb::test {

// What the links of one communicator share. Ranks take turns (sim/sim_ranks.h), so nothing here is locked but what the
// watchdogs touch: flags and releases.
class PeerWorld {
 public:
  explicit PeerWorld(int rank_num);

  PeerFlags flags(int rank);
  std::atomic<bool>& is_released(int rank) { return is_released_[static_cast<std::size_t>(rank)]; }

  // The parts of the `number`-th allocation, by rank.
  std::vector<std::shared_ptr<SimMemory>>& parts(std::uint64_t number);

 private:
  std::size_t rank_num_;
  std::vector<std::vector<std::uint64_t>> rows_;
  std::vector<std::atomic<bool>> is_released_;
  std::map<std::uint64_t, std::vector<std::shared_ptr<SimMemory>>> allocations_;  // as long as the world
};

class SimPeerLink final : public PeerLink {
 public:
  // What allocations are said to take, as CUDA makes them.
  static constexpr std::size_t kGranularityBytes = std::size_t{2} << 20U;

  SimPeerLink(std::shared_ptr<SimDevice> device, std::shared_ptr<PeerWorld> world, int rank, int world_size, Lane lane,
              std::shared_ptr<MemoryOverhead> overhead);

  int rank() const noexcept override { return rank_; }
  int world_size() const noexcept override { return world_size_; }

  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, std::string_view what) override;
  std::unique_ptr<PeerPages> make_pages(std::string_view what) override;

  void announce() override;
  void await() override;
  void release() noexcept override { world_->is_released(rank_) = true; }
  bool is_idle() noexcept override { return true; }  // a release stays

 private:
  class Memory final : public PeerMemory {
   public:
    Memory(const std::shared_ptr<SimDevice>& device, std::shared_ptr<std::byte> mine,
           const std::vector<std::shared_ptr<SimMemory>>& parts, std::size_t bytes,
           std::shared_ptr<MemoryOverhead> overhead);
    ~Memory() override;

    const std::shared_ptr<SimMemory>& part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }

   private:
    std::weak_ptr<SimDevice> device_;
    std::shared_ptr<std::byte> mine_;
    std::vector<std::shared_ptr<SimMemory>> parts_;
    std::size_t bytes_;
    std::shared_ptr<MemoryOverhead> overhead_;
  };

  class Pages final : public PeerPages {
   public:
    Pages(std::shared_ptr<SimDevice> device, int rank, std::string_view what);

    std::size_t page_bytes() const noexcept override { return zb::page_bytes(); }
    std::size_t page_num() const noexcept override { return pages_.size(); }
    void grow(std::size_t page_num) override;
    std::shared_ptr<std::byte> map(std::size_t first, std::size_t before_num, const std::shared_ptr<PeerMemory>& own,
                                   std::size_t after_num) override;

   private:
    std::shared_ptr<SimDevice> device_;
    int rank_;
    std::string what_;
    std::vector<std::shared_ptr<SimMemory>> pages_;
    std::vector<std::shared_ptr<std::byte>> watched_;  // the same, for the race detector
  };

  std::shared_ptr<SimDevice> device_;
  std::shared_ptr<PeerWorld> world_;
  PeerFlags flags_;
  int rank_;
  int world_size_;
  Lane lane_;
  std::shared_ptr<MemoryOverhead> overhead_;
  std::uint64_t next_number_ = 0;
  std::uint64_t meeting_ = 0;
};

// Tells the race detector that peers read what a rank shows them, from the first meeting of a group to its last, and
// that they push from the end of the operation before a pushed one on.
class WatchedPeerTransport final : public LaneTransport {
 public:
  WatchedPeerTransport(std::shared_ptr<SimDevice> device, Lane lane, std::unique_ptr<PeerLink> link,
                       std::size_t scratch_bytes);

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole role, std::string_view what) override;
  std::uint64_t place_of(const LaneCall& call) const override { return inner_.place_of(call); }
  bool splices() const noexcept override { return inner_.splices(); }
  std::unique_ptr<SplicedMemory> make_spliced_memory(std::string_view what) override;
  bool gathers_final_shards() const noexcept override { return inner_.gathers_final_shards(); }
  bool takes_pushes() const noexcept override { return inner_.takes_pushes(); }
  void push(const LaneCall& call, std::span<const PackItem> items, std::size_t copy_bytes) override;
  void put_in(std::span<const LaneCall> calls) override;
  bool abort() noexcept override { return inner_.abort(); }

 private:
  void show(std::span<const LaneCall> calls);

  // The slices that peers push to.
  std::vector<Touched> of_peers(const LaneCall& call) const;

  std::shared_ptr<SimDevice> device_;
  Lane lane_;
  int rank_;
  int world_size_;
  Clock ended_{};  // the lane's, at the end of the last operation
  PeerTransport inner_;
};

}  // namespace zb::test
