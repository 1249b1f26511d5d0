#include "comm/peer_transport.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/peer_splice.h"
#include "common/error.h"
#include "common/round_up.h"

namespace zb {
namespace {

// Of one attempt. Mostly longer than what stands in a lane takes to run.
constexpr std::chrono::seconds kAbortPatience{30};
constexpr std::chrono::milliseconds kAbortTurn{1};
constexpr std::size_t kPartBytes = 256;  // parts of an all_reduce begin at multiples of it

// A rank's part of an all_reduce, in bytes of the buffer.
struct Part {
  std::size_t begin_bytes = 0;
  std::size_t bytes = 0;
};

Part part_of(const LaneCall& call, int rank, int world_size) {
  const std::size_t all_bytes = call.num * dtype_bytes(call.dtype);
  const auto ranks = static_cast<std::size_t>(world_size);
  const std::size_t part_bytes = round_up((all_bytes + ranks - 1) / ranks, kPartBytes);
  const std::size_t begin_bytes = std::min(all_bytes, part_bytes * static_cast<std::size_t>(rank));
  return {begin_bytes, std::min(part_bytes, all_bytes - begin_bytes)};
}

}  // namespace

PeerTransport::PeerTransport(std::shared_ptr<Device> device, Lane lane, std::unique_ptr<PeerLink> link,
                             std::size_t scratch_bytes)
    : device_(std::move(device)),
      lane_(lane),
      link_(std::move(link)),
      rank_(link_->rank()),
      world_size_(link_->world_size()),
      scratch_bytes_(scratch_bytes),
      scratch_(device_->allocate(scratch_bytes, "pieces of reductions")) {
  ZB_EXPECT(scratch_bytes >= kAlignment * static_cast<std::size_t>(world_size_),
            "the scratch of reductions is too small for " + std::to_string(world_size_) + " ranks");
}

std::shared_ptr<std::byte> PeerTransport::allocate(std::size_t bytes, BufferRole role, std::string_view what) {
  if (role == BufferRole::kPrivate) return device_->allocate(bytes, what);
  Shared shared = take(bytes, role, what);
  std::byte* const begin = shared.memory->of(rank_) + shared.offset_bytes;
  const std::lock_guard lock(registry_->mutex);
  registry_->by_begin[begin] = shared;
  return {begin, [registry = registry_, memory = std::move(shared.memory)](std::byte* data) {
            const std::lock_guard held(registry->mutex);
            registry->by_begin.erase(data);
          }};
}

std::unique_ptr<SplicedMemory> PeerTransport::make_spliced_memory(std::string_view what) {
  return std::make_unique<PeerSplice>(
      rank_, world_size_, link_->make_pages(what), [registry = registry_](const std::byte* data) {
        const std::lock_guard lock(registry->mutex);
        const auto found = registry->by_begin.find(data);
        const bool is_alone = found != registry->by_begin.end() && found->second.is_alone;
        return is_alone ? found->second.memory : nullptr;
      });
}

PeerTransport::Shared PeerTransport::take(std::size_t bytes, BufferRole role, std::string_view what) {
  const std::uint64_t number = next_number_++;
  const std::size_t taken_bytes = round_up(std::max<std::size_t>(bytes, 1), kAlignment);
  const bool is_alone = role == BufferRole::kSharedAlone;
  if (is_alone || taken_bytes > kBlockBytes / 2) {
    return {link_->allocate(taken_bytes, what), 0, bytes, number, is_alone};
  }
  if (block_ == nullptr || block_used_bytes_ + taken_bytes > kBlockBytes) {
    block_ = link_->allocate(kBlockBytes, what);
    block_used_bytes_ = 0;
  }
  const std::size_t offset_bytes = std::exchange(block_used_bytes_, block_used_bytes_ + taken_bytes);
  return {block_, offset_bytes, bytes, number, false};
}

bool PeerTransport::is_in_place(const LaneCall& call) const noexcept {
  return call.kind == Collective::kAllGather &&
         call.source == call.destination + static_cast<std::size_t>(rank_) * call.num;
}

PeerTransport::Place PeerTransport::find(const LaneCall& call) const {
  const std::byte* const begin = is_in_place(call) ? call.destination : call.source;
  const std::lock_guard lock(registry_->mutex);
  const auto next = registry_->by_begin.upper_bound(begin);
  if (next != registry_->by_begin.begin()) {
    const auto& [data, shared] = *std::prev(next);
    const auto offset_bytes = static_cast<std::size_t>(begin - data);
    if (offset_bytes < shared.bytes) return {shared, shared.offset_bytes + offset_bytes};
  }
  throw ArgumentError(std::string(collective_name(call.kind)) +
                      ": peers read the source, so its buffer must be allocated with BufferRole::kShared by this "
                      "communicator");
}

std::uint64_t PeerTransport::place_of(const LaneCall& call) const {
  if (call.num == 0) return 0;
  const Place place = find(call);
  return (place.shared.number << 40U | place.offset_bytes) * 2 + (is_in_place(call) ? 1 : 0);
}

template <typename Visit>
void PeerTransport::for_each_peer(const Visit& visit) const {
  for (int step = 1; step < world_size_; ++step)
    visit((rank_ + step) % world_size_, static_cast<std::size_t>(step - 1));
}

void PeerTransport::meet() {
  link_->announce();
  link_->await();
}

void PeerTransport::check_alive() const {
  if (is_aborted_) throw StateError("the peer communicator was aborted");
}

void PeerTransport::push(const LaneCall& call, std::span<const PackItem> items, std::size_t copy_bytes) {
  const std::lock_guard lock(mutex_);
  check_alive();
  if (call.num == 0) return;
  std::vector<std::vector<Piece>> pieces = cut(call, items, copy_bytes);
  staying_[call.source] = take_those_that_stay(pieces[static_cast<std::size_t>(rank_)]);
  std::vector<PackItem> packed;
  const auto pack = [&] {
    if (!packed.empty()) device_->pack(lane_, packed);
    packed.clear();
  };
  const auto put = [&](int rank) {
    for (const auto& [item, begin, is_copied] : pieces[static_cast<std::size_t>(rank)]) {
      if (is_copied) {
        device_->copy(lane_, item.destination, item.source, item.bytes());
        continue;
      }
      if (item.accumulate) pack();  // to what an item before it wrote
      packed.push_back(item);
    }
  };
  for_each_peer([&](int peer, std::size_t) { put(peer); });
  put(rank_);
  pack();
}

std::vector<std::vector<PeerTransport::Piece>> PeerTransport::cut(const LaneCall& call, std::span<const PackItem> items,
                                                                  std::size_t copy_bytes) const {
  const std::size_t element_bytes = dtype_bytes(call.dtype);
  const Place place = find(call);
  const std::size_t slice_numel = static_cast<std::size_t>(rank_) * call.num;
  std::vector<std::vector<Piece>> pieces(static_cast<std::size_t>(world_size_));
  for (const PackItem& item : items) {
    const bool is_copied = item.is_copy() && item.bytes() >= copy_bytes;
    const auto begin_bytes = static_cast<std::size_t>(static_cast<const std::byte*>(item.destination) - call.source);
    for (std::size_t done = 0; done < item.numel;) {
      const std::size_t at = begin_bytes / element_bytes + done;
      const std::size_t rank = at / call.num;
      const std::size_t within = at % call.num;
      PackItem piece = item;
      piece.destination = place.at(static_cast<int>(rank)) + (slice_numel + within) * element_bytes;
      if (item.source != nullptr) {
        piece.source = static_cast<const std::byte*>(item.source) + done * dtype_bytes(item.source_dtype);
      }
      piece.numel = std::min(item.numel - done, call.num - within);
      pieces[rank].push_back({piece, within, is_copied});
      done += piece.numel;
    }
  }
  return pieces;
}

std::vector<FlatPiece> PeerTransport::take_those_that_stay(std::vector<Piece>& pieces) {
  std::vector<FlatPiece> added;
  for (const Piece& piece : pieces) {
    if (piece.item.accumulate) added.push_back(piece.in_shard());
  }
  std::vector<FlatPiece> staying;
  std::erase_if(pieces, [&](const Piece& piece) {
    if (!piece.is_copied) return false;
    const FlatPiece mine = piece.in_shard();
    const bool changes = std::any_of(added.begin(), added.end(), [&](const FlatPiece& more) {
      return more.begin < mine.begin + mine.numel && mine.begin < more.begin + more.numel;
    });
    if (!changes) staying.push_back(mine);
    return !changes;
  });
  std::sort(staying.begin(), staying.end(), [](const FlatPiece& a, const FlatPiece& b) { return a.begin < b.begin; });
  return staying;
}

void PeerTransport::put_in(std::span<const LaneCall> all_calls) {
  const std::lock_guard lock(mutex_);
  check_alive();
  std::vector<LaneCall> calls;
  std::copy_if(all_calls.begin(), all_calls.end(), std::back_inserter(calls),
               [](const LaneCall& call) { return call.num != 0; });
  if (calls.empty()) return;
  if (std::all_of(calls.begin(), calls.end(), [](const LaneCall& call) { return call.is_final; })) {
    for (const LaneCall& call : calls) pull(call);
    return;
  }
  link_->announce();
  for (const LaneCall& call : calls) copy_own_part(call);  // while peers may still be on their way
  link_->await();
  for (const LaneCall& call : calls) pull(call);
  const auto is_all_reduce = [](const LaneCall& call) { return call.kind == Collective::kAllReduce; };
  if (std::any_of(calls.begin(), calls.end(), is_all_reduce)) {
    meet();
    for (const LaneCall& call : calls) {
      if (is_all_reduce(call)) all_reduce_others(call);
    }
  }
  meet();
}

void PeerTransport::copy_own_part(const LaneCall& call) {
  if (call.kind != Collective::kAllGather || call.holds_own_part || is_in_place(call)) return;
  device_->copy(lane_, call.destination + static_cast<std::size_t>(rank_) * call.num, call.source, call.num);
}

void PeerTransport::pull(const LaneCall& call) {
  switch (call.kind) {
    case Collective::kAllGather:
      return gather(call);
    case Collective::kReduceScatter:
      return reduce_scatter(call);
    case Collective::kAllReduce:
      return all_reduce_own_part(call);
    case Collective::kBroadcast:
      if (rank_ != call.root) device_->copy(lane_, call.destination, find(call).at(call.root), call.num);
      return;
    case Collective::kExchange:
    case Collective::kBarrier:
      break;  // over the control communicator
  }
  throw ArgumentError(std::string(collective_name(call.kind)) + " cannot run in a lane");
}

void PeerTransport::gather(const LaneCall& call) {
  const Place place = find(call);
  const bool in_place = is_in_place(call);
  for_each_peer([&](int peer, std::size_t) {
    const std::size_t slice = static_cast<std::size_t>(peer) * call.num;
    device_->copy(lane_, call.destination + slice, place.at(peer) + (in_place ? slice : 0), call.num);
  });
}

void PeerTransport::reduce_scatter(const LaneCall& call) {
  if (call.is_pushed) return sum_pushed(call);
  const std::size_t slice = static_cast<std::size_t>(rank_) * call.num * dtype_bytes(call.dtype);
  sum_into(call.destination, find(call), slice, call.num, call.dtype);
}

void PeerTransport::sum_pushed(const LaneCall& call) {
  const std::size_t element_bytes = dtype_bytes(call.dtype);
  std::vector<const void*> sources(static_cast<std::size_t>(world_size_));
  const auto sum = [&](std::size_t begin, std::size_t end, const void* staying) {
    if (begin == end) return;
    for (std::size_t rank = 0; rank < sources.size(); ++rank) {
      sources[rank] = call.source + (rank * call.num + begin) * element_bytes;
    }
    if (staying != nullptr) sources[static_cast<std::size_t>(rank_)] = staying;
    device_->sum(lane_, call.destination + begin * element_bytes, sources, call.dtype, end - begin);
  };
  std::size_t done = 0;
  for (const FlatPiece& piece : std::exchange(staying_[call.source], {})) {
    sum(done, piece.begin, nullptr);
    done = piece.begin + piece.numel;
    sum(piece.begin, done, piece.data);
  }
  sum(done, call.num, nullptr);
}

// Nobody else reads this rank's part of its own buffer, so the sum may go there at once.
void PeerTransport::all_reduce_own_part(const LaneCall& call) {
  const Part part = part_of(call, rank_, world_size_);
  sum_into(call.destination + part.begin_bytes, find(call), part.begin_bytes, part.bytes / dtype_bytes(call.dtype),
           call.dtype);
}

void PeerTransport::all_reduce_others(const LaneCall& call) {
  const Place place = find(call);
  for_each_peer([&](int peer, std::size_t) {
    const Part part = part_of(call, peer, world_size_);
    if (part.bytes == 0) return;
    device_->copy(lane_, call.destination + part.begin_bytes, place.at(peer) + part.begin_bytes, part.bytes);
  });
}

void PeerTransport::sum_into(std::byte* destination, const Place& place, std::size_t offset_bytes, std::size_t numel,
                             DType dtype) {
  const std::size_t element_bytes = dtype_bytes(dtype);
  const std::size_t piece_bytes = scratch_bytes_ / static_cast<std::size_t>(world_size_ - 1) / kAlignment * kAlignment;
  const std::size_t piece_numel = piece_bytes / element_bytes;
  std::vector<const void*> sources(static_cast<std::size_t>(world_size_));
  for (std::size_t done = 0; done < numel; done += piece_numel) {
    const std::size_t part_numel = std::min(piece_numel, numel - done);
    const std::size_t at_bytes = offset_bytes + done * element_bytes;
    sources[static_cast<std::size_t>(rank_)] = place.at(rank_) + at_bytes;
    for_each_peer([&](int peer, std::size_t index) {
      std::byte* const piece = scratch_.get() + index * piece_bytes;
      device_->copy(lane_, piece, place.at(peer) + at_bytes, part_numel * element_bytes);
      sources[static_cast<std::size_t>(peer)] = piece;
    });
    device_->sum(lane_, destination + done * element_bytes, sources, dtype, part_numel);
  }
}

// Flags are raised until the lane has passed them all: what still stands in a peer's lane may lower one again.
bool PeerTransport::abort() noexcept {
  is_aborted_ = true;
  const auto deadline = std::chrono::steady_clock::now() + kAbortPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    link_->release();
    const std::unique_lock lock(mutex_, std::try_to_lock);  // else something is still being put in
    if (lock && link_->is_idle()) return true;
    std::this_thread::sleep_for(kAbortTurn);
  }
  return false;
}

}  // namespace zb
