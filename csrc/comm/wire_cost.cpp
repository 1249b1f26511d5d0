#include "comm/wire_cost.h"

#include <bit>

namespace zb {

WireCost wire_cost(Algorithms algorithms, Collective collective, std::uint64_t full_bytes, int world_size) noexcept {
  const auto ranks = static_cast<std::uint64_t>(world_size);
  const auto others = static_cast<std::uint32_t>(world_size - 1);
  const auto tree_rounds = static_cast<std::uint32_t>(std::bit_width(others));
  const bool is_gloo = algorithms == Algorithms::kGloo;
  switch (collective) {
    case Collective::kReduceScatter:
      if (is_gloo) return wire_cost(algorithms, Collective::kAllReduce, full_bytes, world_size);
      [[fallthrough]];
    case Collective::kAllGather:
    case Collective::kExchange:
      return {full_bytes / ranks * others, others};
    case Collective::kAllReduce:
      return {2 * full_bytes / ranks * others, 2 * others};
    case Collective::kBroadcast:
      if (is_gloo) return {tree_rounds * full_bytes, tree_rounds};
      return {others == 0 ? 0 : full_bytes, others};
    case Collective::kBarrier:
      break;
  }
  return {0, tree_rounds};
}

}  // namespace zb
