// Sizes and offsets up to the next multiple of an alignment.
#pragma once

#include <cstddef>

namespace zb {

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace zb
