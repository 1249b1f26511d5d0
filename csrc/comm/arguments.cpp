#include "comm/arguments.h"

#include <cstdint>

namespace zb {
namespace {

void check_region(const Region& region, std::size_t bytes, const std::string& what) {
  ZB_EXPECT(region.buffer != nullptr, what + " has no buffer; allocate one from the communicator");
  ZB_EXPECT(region.offset_bytes <= region.buffer->bytes() && bytes <= region.buffer->bytes() - region.offset_bytes,
            what + " ends outside of its buffer: offset " + std::to_string(region.offset_bytes) + " plus " +
                std::to_string(bytes) + " bytes in a buffer of " + std::to_string(region.buffer->bytes()) + " bytes");
}

std::shared_ptr<Buffer> check_shared_region(const Caller& caller, const Region& region, std::size_t bytes,
                                            const std::string& what) {
  check_region(region, bytes, what);
  if (caller.source_rule == SourceRule::kRegistered) return nullptr;
  auto buffer = std::dynamic_pointer_cast<Buffer>(region.buffer);
  ZB_EXPECT(buffer != nullptr && buffer->role() == BufferRole::kShared,
            what + " is read by peers, so its buffer must be allocated with BufferRole::kShared");
  ZB_EXPECT(caller.source_rule != SourceRule::kParts ||
                (buffer->parts().rank == caller.rank && buffer->parts().world_size == caller.world_size),
            what + " must lie in a buffer that a shm communicator of the same ranks allocated");
  return buffer;
}

void check_alignment(const Region& region, DType dtype, const std::string& what) {
  ZB_EXPECT(region.offset_bytes % dtype_bytes(dtype) == 0,
            what + " starts at byte " + std::to_string(region.offset_bytes) + ", which is not a multiple of the " +
                std::to_string(dtype_bytes(dtype)) + " bytes of a " + std::string(dtype_name(dtype)));
}

// `shard` may be apart from `full`, or be this rank's slice of it.
void check_overlap(const Caller& caller, const Region& shard, const Region& full, std::size_t shard_bytes,
                   const std::string& what) {
  const auto rank = static_cast<std::size_t>(caller.rank);
  const auto ranks = static_cast<std::size_t>(caller.world_size);
  const auto shard_begin = reinterpret_cast<std::uintptr_t>(shard.data());
  const auto full_begin = reinterpret_cast<std::uintptr_t>(full.data());
  const bool is_apart = shard_begin + shard_bytes <= full_begin || full_begin + ranks * shard_bytes <= shard_begin;
  ZB_EXPECT(is_apart || shard_begin == full_begin + rank * shard_bytes,
            what + ": source and destination overlap; only this rank's own slice may be both");
}

std::size_t checked_product(std::size_t a, std::size_t b, const std::string& what) {
  std::size_t product = 0;
  ZB_EXPECT(!__builtin_mul_overflow(a, b, &product), what + ": the size does not fit in 64 bits");
  return product;
}

}  // namespace

std::string operation_text(std::string_view name, std::string_view label) {
  std::string text(name);
  if (!label.empty()) text.append(" of '").append(label).append("'");
  return text;
}

std::shared_ptr<Buffer> check_all_gather(const Caller& caller, const AllGather& args) {
  const std::string what = operation_text("all_gather", args.label);
  const std::size_t full_bytes = checked_product(args.shard_bytes, static_cast<std::size_t>(caller.world_size), what);
  auto source = check_shared_region(caller, args.source, args.shard_bytes, what + ": the source");
  check_region(args.destination, full_bytes, what + ": the destination");
  check_overlap(caller, args.source, args.destination, args.shard_bytes, what);
  return source;
}

std::shared_ptr<Buffer> check_reduce_scatter(const Caller& caller, const ReduceScatter& args) {
  const std::string what = operation_text("reduce_scatter", args.label);
  const std::size_t shard_bytes = checked_product(args.shard_numel, dtype_bytes(args.dtype), what);
  const std::size_t full_bytes = checked_product(shard_bytes, static_cast<std::size_t>(caller.world_size), what);
  auto source = check_shared_region(caller, args.source, full_bytes, what + ": the source");
  check_region(args.destination, shard_bytes, what + ": the destination");
  check_alignment(args.source, args.dtype, what + ": the source");
  check_alignment(args.destination, args.dtype, what + ": the destination");
  check_overlap(caller, args.destination, args.source, shard_bytes, what);
  ZB_EXPECT(!args.is_pushed || caller.takes_pushes, what + ": this communicator does not support pushes");
  return source;
}

void check_push(const Caller& caller, const Push& args) {
  const std::string what = operation_text("push", args.label);
  ZB_EXPECT(caller.takes_pushes, what + ": this communicator does not support pushes");
  const std::size_t shard_bytes = checked_product(args.shard_numel, dtype_bytes(args.dtype), what);
  const std::size_t full_bytes = checked_product(shard_bytes, static_cast<std::size_t>(caller.world_size), what);
  check_shared_region(caller, args.source, full_bytes, what + ": the source");
  check_alignment(args.source, args.dtype, what + ": the source");
  for (const PackItem& item : args.items) {
    const auto* const begin = static_cast<const std::byte*>(item.destination);
    ZB_EXPECT(item.destination_dtype == args.dtype && begin >= args.source.data() &&
                  begin + item.numel * dtype_bytes(args.dtype) <= args.source.data() + full_bytes,
              what + ": every item must be written to the source, in its dtype");
  }
}

std::shared_ptr<Buffer> check_all_reduce(const Caller& caller, const AllReduce& args) {
  const std::string what = operation_text("all_reduce", args.label);
  const std::size_t bytes = checked_product(args.numel, dtype_bytes(args.dtype), what);
  auto buffer = check_shared_region(caller, args.buffer, bytes, what + ": the buffer");
  check_alignment(args.buffer, args.dtype, what + ": the buffer");
  return buffer;
}

std::shared_ptr<Buffer> check_broadcast(const Caller& caller, const Broadcast& args) {
  const std::string what = operation_text("broadcast", args.label);
  ZB_EXPECT(
      args.root >= 0 && args.root < caller.world_size,
      what + ": root " + std::to_string(args.root) + " is not a rank; there are " + std::to_string(caller.world_size));
  return check_shared_region(caller, args.buffer, args.bytes, what + ": the buffer");
}

void check_exchange(const Caller& caller, std::size_t mine_bytes, std::size_t all_bytes, std::string_view label) {
  ZB_EXPECT(all_bytes == mine_bytes * static_cast<std::size_t>(caller.world_size),
            operation_text("exchange", label) + ": room for " + std::to_string(all_bytes) + " bytes, expected " +
                std::to_string(mine_bytes) + " bytes from each of " + std::to_string(caller.world_size) + " ranks");
}

}  // namespace zb
