#include "comm/shm_operation.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "comm/arguments.h"
#include "common/round_up.h"
#include "kernels/cpu_kernels.h"

namespace zb::shm {
namespace {

std::string_view kind_name(OperationKind kind) noexcept {
  return kind == OperationKind::kAllocate ? "allocate" : collective_name(static_cast<Collective>(kind));
}

bool has_dtype(OperationKind kind) noexcept {
  return kind == OperationKind::kReduceScatter || kind == OperationKind::kAllReduce;
}

std::string sizes_text(const Descriptor& descriptor) {
  if (descriptor.kind == OperationKind::kBarrier) return {};
  std::string text = " (" + std::to_string(descriptor.bytes) + " bytes";
  if (has_dtype(descriptor.kind)) text.append(" of ").append(dtype_name(descriptor.dtype));
  if (descriptor.kind == OperationKind::kBroadcast) text += ", root " + std::to_string(descriptor.root);
  if (descriptor.kind <= OperationKind::kBroadcast) text += ", buffer " + std::to_string(descriptor.buffer_id);
  return text + ")";
}

bool is_same_call(const Descriptor& a, const Descriptor& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.root == b.root && a.history == b.history && a.bytes == b.bytes &&
         a.buffer_id == b.buffer_id;
}

// FNV-1a over what must be equal.
std::uint32_t next_history(const Descriptor& descriptor) noexcept {
  std::uint64_t hash = 14695981039346656037U;
  for (const std::uint64_t value : {std::uint64_t{descriptor.history}, static_cast<std::uint64_t>(descriptor.kind),
                                    static_cast<std::uint64_t>(descriptor.dtype), std::uint64_t{descriptor.root},
                                    descriptor.bytes, descriptor.buffer_id}) {
    hash = (hash ^ value) * 1099511628211U;
  }
  return static_cast<std::uint32_t>(hash ^ hash >> 32);
}

void copy_bytes(std::byte* destination, const std::byte* source, std::size_t bytes) {
  if (destination != source && bytes != 0) cpu_kernels().copy(destination, source, bytes);
}

// all_reduce is split over the ranks in pieces of whole cache lines (of the buffer's start, not of memory).
struct Piece {
  std::size_t begin_numel = 0;
  std::size_t numel = 0;
};

Piece piece_of(std::size_t numel, DType dtype, int rank, int world_size) noexcept {
  const std::size_t line_numel = 64 / dtype_bytes(dtype);
  const auto ranks = static_cast<std::size_t>(world_size);
  const std::size_t lines = (numel + line_numel - 1) / line_numel;
  const std::size_t piece_numel = (lines + ranks - 1) / ranks * line_numel;
  const std::size_t begin = std::min(numel, piece_numel * static_cast<std::size_t>(rank));
  return {begin, std::min(piece_numel, numel - begin)};
}

// [Note: halves] A piece is summed and copied in two halves: while one rank sums its second half, a later one may still
// sum its first, so that ranks which are a little apart do not wait for each other.
Piece half_of(const Piece& piece, DType dtype, std::size_t half) noexcept {
  const std::size_t line_numel = 64 / dtype_bytes(dtype);
  const std::size_t first_numel = std::min(piece.numel, round_up(piece.numel / 2, line_numel));
  if (half == 0) return {piece.begin_numel, first_numel};
  return {piece.begin_numel + first_numel, piece.numel - first_numel};
}

// The value that `reduced` passes once this half is summed.
std::uint64_t reduced_sequence(const Operation& operation, std::size_t half) noexcept {
  return kHalfNum * operation.sequence + half;
}

}  // namespace

bool moves_data(const Operation& operation) noexcept { return operation.descriptor.kind <= OperationKind::kBroadcast; }

bool writes_source_of(const Operation& earlier, const Operation& later, int rank, int world_size) noexcept {
  const auto bytes_read = [&](const Operation& operation) -> std::size_t {
    const Descriptor& descriptor = operation.descriptor;
    if (descriptor.kind == OperationKind::kReduceScatter)
      return descriptor.bytes * static_cast<std::size_t>(world_size);
    return descriptor.kind == OperationKind::kBroadcast && descriptor.root != rank ? 0 : descriptor.bytes;
  };
  const auto source_of = [&](const Operation& operation) {
    return operation.source->data_of(rank) + operation.descriptor.offset_bytes;
  };
  if (earlier.source == nullptr || later.source == nullptr) return false;
  if (earlier.descriptor.bytes == 0 || later.descriptor.bytes == 0) return false;
  const std::byte* begin = source_of(later);
  const std::byte* end = begin + bytes_read(later);
  const auto overlaps = [&](const std::byte* from, const std::byte* to) { return begin < to && from < end; };
  const Descriptor& descriptor = earlier.descriptor;
  if (descriptor.kind == OperationKind::kBroadcast && descriptor.root == rank) return false;
  if (descriptor.kind != OperationKind::kAllGather) {
    return overlaps(earlier.destination, earlier.destination + descriptor.bytes);
  }
  const std::byte* own = earlier.destination + descriptor.bytes * static_cast<std::size_t>(rank);
  const std::byte* full_end = earlier.destination + descriptor.bytes * static_cast<std::size_t>(world_size);
  if (own != source_of(earlier)) return overlaps(earlier.destination, full_end);
  return overlaps(earlier.destination, own) || overlaps(own + descriptor.bytes, full_end);  // in place: not its own
}

std::string describe(const Operation& operation) {
  return operation_text(kind_name(operation.descriptor.kind), operation.label);
}

std::string describe(const Descriptor& descriptor) {
  const std::size_t length = ::strnlen(descriptor.label.data(), kLabelBytes);
  return operation_text(kind_name(descriptor.kind), {descriptor.label.data(), length});
}

void Runner::prepare(Operation& operation) {
  RankBlock& own = peers_.own();
  Descriptor& slot = own.ring[operation.sequence % kRingDepth];
  const std::size_t label_length = std::min(operation.label.size(), kLabelBytes);
  std::memcpy(operation.descriptor.label.data(), operation.label.data(), label_length);
  if (!operation.message.empty()) {
    std::byte* payload = operation.message.size() <= kInlineBytes ? operation.descriptor.payload.data()
                                                                  : own.payload[operation.payload_index].data();
    std::memcpy(payload, operation.message.data(), operation.message.size());
  }
  operation.descriptor.history = history_;
  history_ = next_history(operation.descriptor);
  slot = operation.descriptor;
}

bool Runner::step(Operation& operation) {
  switch (operation.descriptor.kind) {
    case OperationKind::kAllGather:
      return all_gather(operation);
    case OperationKind::kReduceScatter:
      return reduce_scatter(operation);
    case OperationKind::kAllReduce:
      return all_reduce(operation);
    case OperationKind::kBroadcast:
      return broadcast(operation);
    case OperationKind::kExchange:
    case OperationKind::kAllocate:
      return exchange(operation);
    case OperationKind::kBarrier:
      break;
  }
  return barrier(operation);
}

bool Runner::awaits(const Operation& operation, int peer) noexcept {
  if (peer == peers_.rank()) return false;
  const Descriptor& descriptor = operation.descriptor;
  if (descriptor.kind == OperationKind::kBroadcast && peer != descriptor.root) return false;
  if (descriptor.kind != OperationKind::kAllReduce || !operation.is_reduced) {
    return !peers_.reached(peer, Counter::kPosted, operation.sequence);
  }
  const std::size_t half = operation.copied_halves[0].test(static_cast<std::size_t>(peer)) ? 1 : 0;
  return !peers_.reached(peer, Counter::kReduced, reduced_sequence(operation, half));
}

std::uint32_t Runner::interest(const Operation& operation) noexcept {
  const Descriptor& descriptor = operation.descriptor;
  switch (descriptor.kind) {
    case OperationKind::kAllGather:
    case OperationKind::kExchange:
    case OperationKind::kAllocate:
      return interest_in(Counter::kPosted, kAnyRank);
    case OperationKind::kAllReduce:
      if (operation.is_reduced) return interest_in(Counter::kReduced, kAnyRank);
      break;
    default:
      break;
  }
  // Nothing can be done before all are there, so one rank after the other is as good and wakes less often.
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (awaits(operation, peer)) return interest_in(Counter::kPosted, static_cast<std::uint32_t>(peer) + 1);
  }
  return interest_in(Counter::kPosted, kAnyRank);
}

bool Runner::all_gather(Operation& operation) {
  const std::size_t shard_bytes = operation.descriptor.bytes;
  const int rank = peers_.rank();
  for (int i = 0; i < peers_.world_size(); ++i) {
    const int peer = (rank + i) % peers_.world_size();  // the own shard first, then spread over the peers
    if (!take(operation, peer, Counter::kPosted)) continue;
    copy_bytes(operation.destination + shard_bytes * static_cast<std::size_t>(peer),
               operation.source->data_of(peer) + descriptor_of(operation.sequence, peer).offset_bytes, shard_bytes);
  }
  return operation.taken.count() == static_cast<std::size_t>(peers_.world_size());
}

bool Runner::reduce_scatter(Operation& operation) {
  if (!all_posted(operation)) return false;
  const std::size_t slice_offset = operation.descriptor.bytes * static_cast<std::size_t>(peers_.rank());
  std::array<const void*, kMaxRanks> sources;
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    sources[static_cast<std::size_t>(peer)] =
        operation.source->data_of(peer) + descriptor_of(operation.sequence, peer).offset_bytes + slice_offset;
  }
  if (operation.numel != 0) {
    cpu_kernels().reduce(operation.destination, sources.data(), static_cast<std::size_t>(peers_.world_size()),
                         operation.descriptor.dtype, operation.numel);
  }
  ++step_num_;
  return true;
}

bool Runner::all_reduce(Operation& operation) {
  if (!operation.is_reduced) {
    if (!all_posted(operation)) return false;
    for (std::size_t half = 0; half < kHalfNum; ++half) {
      reduce_own(operation, half);
      peers_.publish(Counter::kReduced, reduced_sequence(operation, half) + 1);
    }
    operation.is_reduced = true;
    ++step_num_;
  }
  bool has_all = true;
  for (std::size_t half = 0; half < kHalfNum; ++half) {
    for (int i = 1; i < peers_.world_size(); ++i) {
      has_all = copy_reduced(operation, (peers_.rank() + i) % peers_.world_size(), half) && has_all;
    }
  }
  return has_all;
}

std::byte* Runner::reduced_data(const Operation& operation, int peer, std::size_t begin_numel) noexcept {
  return operation.source->data_of(peer) + descriptor_of(operation.sequence, peer).offset_bytes +
         begin_numel * dtype_bytes(operation.descriptor.dtype);
}

void Runner::reduce_own(const Operation& operation, std::size_t half) {
  const DType dtype = operation.descriptor.dtype;
  const Piece own = half_of(piece_of(operation.numel, dtype, peers_.rank(), peers_.world_size()), dtype, half);
  if (own.numel == 0) return;
  std::array<const void*, kMaxRanks> sources;
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    sources[static_cast<std::size_t>(peer)] = reduced_data(operation, peer, own.begin_numel);
  }
  cpu_kernels().reduce(reduced_data(operation, peers_.rank(), own.begin_numel), sources.data(),
                       static_cast<std::size_t>(peers_.world_size()), dtype, own.numel);
}

// True once this half of the peer's piece is here.
bool Runner::copy_reduced(Operation& operation, int peer, std::size_t half) {
  const auto index = static_cast<std::size_t>(peer);
  if (operation.copied_halves[half].test(index)) return true;
  if (!peers_.reached(peer, Counter::kReduced, reduced_sequence(operation, half))) return false;
  const DType dtype = operation.descriptor.dtype;
  const Piece theirs = half_of(piece_of(operation.numel, dtype, peer, peers_.world_size()), dtype, half);
  copy_bytes(reduced_data(operation, peers_.rank(), theirs.begin_numel),
             reduced_data(operation, peer, theirs.begin_numel), theirs.numel * dtype_bytes(dtype));
  operation.copied_halves[half].set(index);
  ++step_num_;
  return true;
}

bool Runner::broadcast(Operation& operation) {
  const int root = operation.descriptor.root;
  if (root == peers_.rank()) return true;
  if (!take(operation, root, Counter::kPosted)) return false;
  copy_bytes(operation.destination,
             operation.source->data_of(root) + descriptor_of(operation.sequence, root).offset_bytes,
             operation.descriptor.bytes);
  return true;
}

bool Runner::exchange(Operation& operation) {
  const std::size_t bytes = operation.message.size();
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (!take(operation, peer, Counter::kPosted) || bytes == 0 || operation.messages == nullptr) continue;
    const std::byte* payload = bytes <= kInlineBytes ? descriptor_of(operation.sequence, peer).payload.data()
                                                     : peers_.of(peer).payload[operation.payload_index].data();
    std::memcpy(operation.messages + operation.message_stride_bytes * static_cast<std::size_t>(peer), payload, bytes);
  }
  return operation.taken.count() == static_cast<std::size_t>(peers_.world_size());
}

bool Runner::barrier(Operation& operation) { return all_posted(operation); }

bool Runner::all_posted(const Operation& operation) {
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (awaits(operation, peer)) return false;
  }
  for (int peer = 0; peer < peers_.world_size(); ++peer) match(operation, peer);
  return true;
}

// True exactly once for each rank, when its part is ready.
bool Runner::take(Operation& operation, int peer, Counter counter) {
  const auto index = static_cast<std::size_t>(peer);
  if (operation.taken.test(index) || !peers_.reached(peer, counter, operation.sequence)) return false;
  match(operation, peer);
  operation.taken.set(index);
  ++step_num_;
  return true;
}

const Descriptor& Runner::descriptor_of(std::uint64_t sequence, int peer) noexcept {
  return peers_.of(peer).ring[sequence % kRingDepth];
}

// Whether a rank's descriptor of an operation that has ended here is in its place yet, which may be used again.
bool Runner::stands(std::uint64_t sequence, int rank) noexcept {
  return !peers_.reached(rank, Counter::kPosted, sequence + kRingDepth - 1);
}

void Runner::match(const Operation& operation, int peer) {
  if (!is_same_call(operation.descriptor, descriptor_of(operation.sequence, peer))) {
    fail_mismatch(operation.sequence, peer);
  }
}

void Runner::fail_mismatch(std::uint64_t sequence, int peer) {
  // Where only the history differs, an earlier operation is to blame, and mostly it still stands in the ring.
  const int rank = peers_.rank();
  std::uint64_t blamed = sequence;
  for (std::uint64_t i = 1; i <= sequence && stands(sequence - i, rank) && stands(sequence - i, peer); ++i) {
    if (!is_same_call(descriptor_of(sequence - i, rank), descriptor_of(sequence - i, peer))) blamed = sequence - i;
  }
  const Descriptor& own = descriptor_of(blamed, rank);
  const Descriptor& theirs = descriptor_of(blamed, peer);
  peers_.fail(-1, "rank " + std::to_string(rank) + " started " + describe(own) + sizes_text(own) + " where rank " +
                      std::to_string(peer) + " started " + describe(theirs) + sizes_text(theirs) + " (operation " +
                      std::to_string(blamed) +
                      "); all ranks must make the same calls in the same order with the same sizes");
}

}  // namespace zb::shm
