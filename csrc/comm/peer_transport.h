// Collectives by copies out of the peers' memory: the transport of a LaneCommunicator whose ranks share one host.
//
// [Note: pulled collectives]
// A group of calls runs in the lane between two meetings (peer_link.h). At the first all sources are final, then each
// rank copies what it needs from where it lies at the peers, one peer after the other, beginning with its neighbour, so
// that no two ranks read the same peer at a time. At the second all have read, so sources may be written again. Copies
// are the work of copy engines. Reductions fetch the peers' pieces into a scratch, a part at a time, and one kernel
// adds them in rank order in float and rounds once; all_reduce meets once more and gathers the sums.
//
// [Note: pushed reductions]
// A rank that has its contribution in many places, as gradients are after a backward, can put the pieces straight to
// the ranks that add them, instead of into one buffer for those to copy from: a write and a read of all of it less. A
// buffer that a reduction would read takes in its slice r what rank r pushes for this rank's shard, and once all ranks
// have met behind their pushes a kernel adds the slices in rank order. Pushes stand in front of that meeting, behind
// the one that ended the operation before, so nobody reads slices any more that a peer writes to. What a rank pushes it
// puts to its neighbour first, and so on, lest all of them write to one rank at a time. Of what it has for its own
// shard, pieces that it would copy stay where they are, and the sum reads them there.
//
// [Note: gathers of final shards]
// Gathers of sources that all ranks know to be final need no meeting: they are copies from peers and nothing else, in
// no particular order among ranks. So their lane does not wait in the queues that kernels go through, of which two that
// wait make a GPU start every kernel a microsecond later. Copies within a device go through those too: this rank's own
// part is put where another lane waits anyway (docs/decisions/0005-peer-communicator.md).
//
// [Note: places]
// A rank knows where a peer's source lies because it lies in the same shared allocation, at the same offset; the source
// of an all_gather in place lies in each rank's own slice of the destination. What calls name is thus part of the
// history by which ranks find out that they started different collectives (collective_history.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "comm/lane_transport.h"
#include "comm/peer_link.h"

namespace zb {

class PeerTransport final : public LaneTransport {
 public:
  // `scratch_bytes` of device memory hold pieces of reductions.
  PeerTransport(std::shared_ptr<Device> device, Lane lane, std::unique_ptr<PeerLink> link, std::size_t scratch_bytes);

  // Shared memory: collective; small pieces share an allocation, since one takes at least kBlockBytes.
  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole role, std::string_view what) override;
  std::uint64_t place_of(const LaneCall& call) const override;
  bool splices() const noexcept override { return true; }
  std::unique_ptr<SplicedMemory> make_spliced_memory(std::string_view what) override;
  bool gathers_final_shards() const noexcept override { return true; }
  bool takes_pushes() const noexcept override { return true; }
  void push(const LaneCall& call, std::span<const PackItem> items, std::size_t copy_bytes) override;
  void put_in(std::span<const LaneCall> calls) override;
  void enter_thread() override { link_->enter_thread(); }
  bool abort() noexcept override;

 private:
  static constexpr std::size_t kBlockBytes = std::size_t{2} << 20U;  // what CUDA makes memory in
  static constexpr std::size_t kAlignment = 256;

  struct Shared {
    std::shared_ptr<PeerMemory> memory;
    std::size_t offset_bytes = 0;  // in it
    std::size_t bytes = 0;
    std::uint64_t number = 0;  // the same on all ranks
    bool is_alone = false;     // BufferRole::kSharedAlone
  };
  // Shared with buffers, which may outlive the transport.
  struct Registry {
    mutable std::mutex mutex;
    std::map<const std::byte*, Shared> by_begin;
  };
  struct Place {
    Shared shared;
    std::size_t offset_bytes = 0;  // in the shared allocation

    std::byte* at(int rank) const noexcept { return shared.memory->of(rank) + offset_bytes; }
  };

  Shared take(std::size_t bytes, BufferRole role, std::string_view what);
  bool is_in_place(const LaneCall& call) const noexcept;
  // Of the region that peers read: the source, or the whole destination of an all_gather in place.
  Place find(const LaneCall& call) const;
  template <typename Visit>
  void for_each_peer(const Visit& visit) const;

  // What an item has for one rank's shard, and where that rank looks for it.
  struct Piece {
    PackItem item;
    std::size_t begin = 0;  // in the shard
    bool is_copied = false;

    FlatPiece in_shard() const noexcept { return {.begin = begin, .numel = item.numel, .data = item.source}; }
  };
  std::vector<std::vector<Piece>> cut(const LaneCall& call, std::span<const PackItem> items,
                                      std::size_t copy_bytes) const;
  // Of the pieces for the own shard those that may stay where they are, in order; the others are left.
  static std::vector<FlatPiece> take_those_that_stay(std::vector<Piece>& pieces);
  void sum_pushed(const LaneCall& call);
  void check_alive() const;

  void copy_own_part(const LaneCall& call);
  void pull(const LaneCall& call);
  void gather(const LaneCall& call);
  void reduce_scatter(const LaneCall& call);
  void all_reduce_own_part(const LaneCall& call);
  void all_reduce_others(const LaneCall& call);
  // destination = sum over ranks of `numel` elements that lie at `offset_bytes` of the ranks' sources.
  void sum_into(std::byte* destination, const Place& place, std::size_t offset_bytes, std::size_t numel, DType dtype);
  void meet();

  std::shared_ptr<Device> device_;
  Lane lane_;
  std::unique_ptr<PeerLink> link_;
  int rank_;
  int world_size_;
  std::size_t scratch_bytes_;
  std::shared_ptr<std::byte> scratch_;
  std::shared_ptr<Registry> registry_ = std::make_shared<Registry>();
  std::uint64_t next_number_ = 1;
  std::shared_ptr<PeerMemory> block_;  // that small pieces are taken from
  std::size_t block_used_bytes_ = 0;
  std::map<const std::byte*, std::vector<FlatPiece>> staying_;  // by the source of the reduction to come
  std::mutex mutex_;                                            // held while something is put in
  std::atomic<bool> is_aborted_ = false;
};

}  // namespace zb
