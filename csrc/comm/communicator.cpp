#include "comm/communicator.h"

#include "comm/finished_work.h"
#include "comm/spliced_slot.h"

namespace zb {

WorkPtr Communicator::start_exchange(std::span<const std::byte> mine, std::span<std::byte> all,
                                     std::string_view label) {
  exchange(mine, all, label);
  return std::make_shared<FinishedWork>();
}

void Communicator::push(const Push&) {
  throw StateError("communicator '" + std::string(kind()) + "' does not support pushes");
}

std::unique_ptr<SplicedSlot> Communicator::make_spliced_slot(Ledger*, Category) {
  throw StateError("communicator '" + std::string(kind()) + "' does not support spliced slots");
}

std::string_view collective_name(Collective collective) noexcept {
  constexpr std::array<std::string_view, kCollectiveNum> kNames{"all_gather", "reduce_scatter", "all_reduce",
                                                                "broadcast",  "exchange",       "barrier"};
  return kNames[static_cast<std::size_t>(collective)];
}

void Communicator::count(Collective collective, std::uint64_t full_bytes) noexcept {
  const auto index = static_cast<std::size_t>(collective);
  const auto ranks = static_cast<std::uint64_t>(world_size_);
  std::uint64_t moved = 0;
  switch (collective) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kExchange:
      moved = full_bytes / ranks * (ranks - 1);
      break;
    case Collective::kAllReduce:
      moved = 2 * full_bytes / ranks * (ranks - 1);
      break;
    case Collective::kBroadcast:
      moved = ranks > 1 ? full_bytes : 0;
      break;
    case Collective::kBarrier:
      break;
  }
  counters_.calls[index] += 1;
  counters_.bytes[index] += moved;
}

}  // namespace zb
