// [Note: remainders]
// A float master and its rounding to bfloat16, which a shard of parameters is, have their upper 16 bits in common, but
// for rounding up, which adds one to them. So a store may keep the lower 16 bits alone, the remainder, and one bit that
// says whether the rounding went up: the remainder tells that but in a tie (0x8000), which goes to the even neighbour.
// The bit lies in the sign of exp_avg_sq, which is never negative. Masters come back to the last bit (any NaN as some
// NaN), as long as nobody else writes the rounding.
//
// Transformer Engine's FusedAdam and Apex's DistributedFusedAdam call them store_param_remainders; they round ties up,
// which needs no further bit, and differs from torch's rounding.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace zb {

inline constexpr std::uint32_t kSignBit = 0x80000000U;

ZB_HOST_DEVICE inline std::uint32_t join_master(std::uint16_t rounded, std::uint16_t remainder, bool is_rounded_up) {
  const auto upper = static_cast<std::uint16_t>(rounded - (is_rounded_up ? 1 : 0));
  return (static_cast<std::uint32_t>(upper) << 16U) | remainder;
}

ZB_HOST_DEVICE inline std::uint16_t remainder_of(std::uint32_t master) { return static_cast<std::uint16_t>(master); }

ZB_HOST_DEVICE inline bool is_rounded_up(std::uint32_t master, std::uint16_t rounded) {
  return static_cast<std::uint16_t>(master >> 16U) != rounded;
}

// `bits` of a float with this sign.
ZB_HOST_DEVICE inline std::uint32_t with_sign(std::uint32_t bits, bool is_negative) {
  return (bits & ~kSignBit) | (is_negative ? kSignBit : 0U);
}

}  // namespace zb
