// What collectives cost on the link between a rank and the others.
#pragma once

#include <cstdint>

#include "comm/communicator.h"

namespace zb {

struct WireCost {
  std::uint64_t bytes = 0;   // that this rank sends
  std::uint32_t rounds = 0;  // of messages, each sent after the one before has come
};

enum class Algorithms : std::uint8_t {
  kRing,  // each rank sends to the next one: NCCL's
  kGloo,  // torch's gloo: reduce_scatter reduces everything on all ranks, broadcast is a tree
};

// `full_bytes`: of all ranks' parts together.
WireCost wire_cost(Algorithms algorithms, Collective collective, std::uint64_t full_bytes, int world_size) noexcept;

}  // namespace zb
