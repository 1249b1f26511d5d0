#include "sim/sim_peers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/error.h"

namespace zb::test {

PeerWorld::PeerWorld(int rank_num) : rank_num_(static_cast<std::size_t>(rank_num)), is_released_(rank_num_) {
  for (std::size_t rank = 0; rank < rank_num_; ++rank) {
    rows_.emplace_back(PeerFlags::row_bytes(rank_num) / sizeof(std::uint64_t), 0);
  }
}

PeerFlags PeerWorld::flags(int rank) {
  std::vector<std::byte*> rows;
  for (auto& row : rows_) rows.push_back(reinterpret_cast<std::byte*>(row.data()));
  return {rank, std::move(rows)};
}

std::vector<std::shared_ptr<SimMemory>>& PeerWorld::parts(std::uint64_t number) {
  auto& parts = allocations_[number];
  parts.resize(rank_num_);
  return parts;
}

SimPeerLink::SimPeerLink(std::shared_ptr<SimDevice> device, std::shared_ptr<PeerWorld> world, int rank, int world_size,
                         Lane lane, std::shared_ptr<MemoryOverhead> overhead)
    : device_(std::move(device)),
      world_(std::move(world)),
      flags_(world_->flags(rank)),
      rank_(rank),
      world_size_(world_size),
      lane_(lane),
      overhead_(std::move(overhead)) {}

std::shared_ptr<PeerMemory> SimPeerLink::allocate(std::size_t bytes, std::string_view what) {
  auto& parts = world_->parts(next_number_++);
  // Peers' views stay valid when this rank drops its own, as those of a driver's allocation do.
  std::shared_ptr<SimMemory>& own = parts[static_cast<std::size_t>(rank_)] = std::make_shared<SimMemory>(bytes);
  std::shared_ptr<std::byte> mine = device_->adopt_mapped(own->bytes(), what, {own, own->data()});
  device_->run_until([&] {
    return world_->is_released(rank_) ||
           std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part != nullptr; });
  });
  if (world_->is_released(rank_)) throw CommunicationError("the ranks were aborted while they allocated", -1);
  const std::size_t taken_bytes = (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
  for (const auto& part : parts) {
    if (part != own) device_->map(part->data(), bytes, what);
  }
  return std::make_shared<Memory>(device_, std::move(mine), parts, taken_bytes, overhead_);
}

std::unique_ptr<PeerPages> SimPeerLink::make_pages(std::string_view what) {
  return std::make_unique<Pages>(device_, rank_, what);
}

void SimPeerLink::announce() {
  device_->put_in(lane_, "announce", {}, [flags = flags_, meeting = ++meeting_, n = world_size_, rank = rank_] {
    for (int peer = 0; peer < n; ++peer) {
      if (peer != rank) flags.raise(peer, meeting);
    }
  });
}

void SimPeerLink::await() {
  device_->put_in_polled(lane_, "await", {},
                         [flags = flags_, meeting = meeting_, n = world_size_, rank = rank_, world = world_] {
                           if (world->is_released(rank)) return true;
                           for (int peer = 0; peer < n; ++peer) {
                             if (peer != rank && !flags.is_up(peer, meeting)) return false;
                           }
                           return true;
                         });
}

SimPeerLink::Memory::Memory(const std::shared_ptr<SimDevice>& device, std::shared_ptr<std::byte> mine,
                            const std::vector<std::shared_ptr<SimMemory>>& parts, std::size_t bytes,
                            std::shared_ptr<MemoryOverhead> overhead)
    : device_(device), mine_(std::move(mine)), parts_(parts), bytes_(bytes), overhead_(std::move(overhead)) {
  for (const auto& part : parts_) views_.push_back(part->data());
  overhead_->take(bytes_);
}

SimPeerLink::Memory::~Memory() {
  overhead_->give_back(bytes_);
  const auto device = device_.lock();
  if (device == nullptr) return;
  for (const auto& part : parts_) {
    if (part->data() != mine_.get()) device->unmap(part->data());
  }
}

SimPeerLink::Pages::Pages(std::shared_ptr<SimDevice> device, int rank, std::string_view what)
    : device_(std::move(device)), rank_(rank), what_(what) {}

void SimPeerLink::Pages::grow(std::size_t page_num) {
  while (pages_.size() < page_num) {
    pages_.push_back(std::make_shared<SimMemory>(page_bytes()));
    std::memset(pages_.back()->data(), 0xFF, page_bytes());
    watched_.push_back(device_->adopt_mapped(page_bytes(), what_, {pages_.back(), pages_.back()->data()}));
  }
}

std::shared_ptr<std::byte> SimPeerLink::Pages::map(std::size_t first, std::size_t before_num,
                                                   const std::shared_ptr<PeerMemory>& own, std::size_t after_num) {
  const auto begin = pages_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto middle = begin + static_cast<std::ptrdiff_t>(before_num);
  std::vector<std::shared_ptr<SimMemory>> memories(begin, middle);
  if (own != nullptr) memories.push_back(static_cast<const Memory&>(*own).part(rank_));
  memories.insert(memories.end(), middle, middle + static_cast<std::ptrdiff_t>(after_num));
  std::vector<RaceDetector::Run> runs;
  for (const auto& memory : memories) runs.push_back({memory->data(), memory->bytes()});
  const auto window = std::make_shared<SimWindow>(memories);
  device_->races().aliased(window->data(), std::move(runs));
  return {window->data(), [device = std::weak_ptr(device_), window](std::byte* data) {
            if (const auto alive = device.lock()) alive->races().forget_alias(data);
          }};
}

WatchedPeerTransport::WatchedPeerTransport(std::shared_ptr<SimDevice> device, Lane lane, std::unique_ptr<PeerLink> link,
                                           std::size_t scratch_bytes)
    : device_(device),
      lane_(lane),
      rank_(link->rank()),
      world_size_(link->world_size()),
      inner_(std::move(device), lane, std::move(link), scratch_bytes) {}

std::shared_ptr<std::byte> WatchedPeerTransport::allocate(std::size_t bytes, BufferRole role, std::string_view what) {
  return inner_.allocate(bytes, role, what);
}

std::unique_ptr<SplicedMemory> WatchedPeerTransport::make_spliced_memory(std::string_view what) {
  return inner_.make_spliced_memory(what);
}

void WatchedPeerTransport::push(const LaneCall& call, std::span<const PackItem> items, std::size_t copy_bytes) {
  const std::vector<Touched> pushed = of_peers(call);
  device_->touch_at(lane_, ended_, "what peers push", pushed);
  device_->put_in(lane_, "what peers push", pushed, [] {});
  inner_.push(call, items, copy_bytes);
}

void WatchedPeerTransport::put_in(std::span<const LaneCall> calls) {
  show(calls);
  inner_.put_in(calls);
  show(calls);
  ended_ = device_->clock_of(lane_);
}

void WatchedPeerTransport::show(std::span<const LaneCall> calls) {
  std::vector<Touched> touched;
  for (const LaneCall& call : calls) {
    if (call.is_pushed) {
      for (const Touched& slice : of_peers(call)) touched.push_back({slice.data, slice.bytes, false});
      continue;
    }
    const bool reduces = call.kind == Collective::kReduceScatter || call.kind == Collective::kAllReduce;
    std::size_t bytes = reduces ? call.num * dtype_bytes(call.dtype) : call.num;
    if (call.kind == Collective::kReduceScatter) bytes *= static_cast<std::size_t>(world_size_);
    touched.push_back({call.source, bytes, false});
  }
  device_->put_in(lane_, "what peers read", touched, [] {});
}

std::vector<Touched> WatchedPeerTransport::of_peers(const LaneCall& call) const {
  std::vector<Touched> slices;
  const std::size_t bytes = call.num * dtype_bytes(call.dtype);
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank != rank_) slices.push_back({call.source + static_cast<std::size_t>(rank) * bytes, bytes, true});
  }
  return slices;
}

}  // namespace zb::test
